// The port channel's header for the host: each call, for threads of the test to make.
#include <cstddef>

#include "portway/port_channel.cuh"

using namespace portway;

struct Outcome {
  u64 status, position;
};

static Outcome outcome(Pushed pushed) { return {static_cast<u64>(pushed.status), pushed.position}; }
static u64 number(Status status) { return static_cast<u64>(status); }

extern "C" {

Outcome portway_test_put(const PortChannel *channel, u64 source, u64 destination, u64 len_bytes) {
  return outcome(channel->put(source, destination, len_bytes));
}
Outcome portway_test_put_signal(const PortChannel *channel, u64 source, u64 destination, u64 len_bytes) {
  return outcome(channel->put_signal(source, destination, len_bytes));
}
u64 portway_test_put_signal_flush(const PortChannel *channel, u64 source, u64 destination, u64 len_bytes) {
  return number(channel->put_signal_flush(source, destination, len_bytes));
}
Outcome portway_test_signal(const PortChannel *channel, u64 n) { return outcome(channel->signal_peer(n)); }
u64 portway_test_flush(const PortChannel *channel, u64 timeout_ns) { return number(channel->flush(timeout_ns)); }
u64 portway_test_wait(const PortChannel *channel, u64 timeout_ns) { return number(channel->wait(timeout_ns)); }
u64 portway_test_poll(const PortChannel *channel) { return number(channel->poll()); }
u64 portway_test_error(const PortChannel *channel) { return channel->error(); }

// The trigger of a request, for comparison with the Rust side's.
void portway_test_request(u32 op, u32 channel, u64 size, u64 source, u64 destination, u64 *words) {
  const Trigger trigger = detail::request(op, channel, size, source, destination);
  words[0] = trigger.words[0];
  words[1] = trigger.words[1];
}

// Offsets of the struct's fields in order, its size, and the constants of the header.
void portway_test_facts(u64 *facts) {
  const u64 all[] = {offsetof(PortChannel, version),
                     offsetof(PortChannel, channel),
                     offsetof(PortChannel, fifo),
                     offsetof(PortChannel, source_len_bytes),
                     offsetof(PortChannel, destination_len_bytes),
                     offsetof(PortChannel, frontier),
                     offsetof(PortChannel, signal),
                     offsetof(PortChannel, expected),
                     sizeof(PortChannel),
                     kChannelVersion,
                     kMaxSize,
                     kMaxPutBytes};
  for (u64 fact : all) *facts++ = fact;
}

} // extern "C"
