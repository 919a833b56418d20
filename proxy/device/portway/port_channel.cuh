// Port channels for kernels: put, signal, flush towards a peer; wait and poll for the peer's signals.
//
// A call pushes one trigger into the channel's FIFO (a long put: several), which the proxy on the host carries out.
// Every call returns a status: it ends with success, when the channel has ended, when the host aborts, or after the
// timeout. `portway_proxy::ChannelProducer` is the same in Rust.
//
// Order within a channel: a signal is never seen before the data of earlier puts; a flush returns when their sources
// may be reused and their data has been delivered. Nothing is promised between channels.
#ifndef PORTWAY_PORT_CHANNEL_CUH
#define PORTWAY_PORT_CHANNEL_CUH

#include "portway/fifo.cuh"

namespace portway {

constexpr u32 kChannelVersion = 1;

// A trigger's fields: `portway_proxy::Request`.
//   word 0   0..40 source offset        40..63 size, low 23 bits
//   word 1   0..40 destination offset   40..45 size, high 5 bits   45..60 channel   60..63 op
constexpr u32 kPut = 1;
constexpr u32 kSignal = 2;
constexpr u32 kFlush = 4;
constexpr u64 kMaxSize = (1ull << 28) - 1;
// The most bytes that one trigger moves; longer puts are split. Every part begins as aligned as the whole.
constexpr u64 kMaxPutBytes = kMaxSize + 1 - 4096;

namespace detail {

PORTWAY_FN Trigger request(u32 op, u32 channel, u64 size, u64 source, u64 destination) {
  return {{source | (size & ((1ull << 23) - 1)) << 40,
           destination | (size >> 23) << 40 | static_cast<u64>(channel) << 45 | static_cast<u64>(op) << 60}};
}

PORTWAY_FN bool inside(u64 offset, u64 len_bytes, u64 limit_bytes) {
  return len_bytes <= limit_bytes && offset <= limit_bytes - len_bytes;
}

} // namespace detail

// Plain data, passed to a kernel by value. `portway_proxy::PortChannelHandle` is the same struct.
//
// Offsets are bytes from the start of the bound source and destination regions; what would leave them is refused with
// kInvalid. A put or a signal of a channel that has ended is dropped by the proxy; flush and wait return kFailed. Calls
// without a timeout take the FIFO's. Any number of threads may call at once; each call is one thread's.
struct PortChannel {
  u32 version;
  u32 channel; // its number in the FIFO
  FifoHandle fifo;
  u64 source_len_bytes;
  u64 destination_len_bytes;
  WatchHandle frontier; // the FIFO position below which all triggers of the channel are complete; stop: the error word
  WatchHandle signal;   // the word that the peer's signals advance; stop: the same error word
  u64 *expected;        // device memory: how many signals have been waited for

  // Moves bytes from the source region to the peer's destination region. `position`: of its (last) trigger.
  PORTWAY_FN Pushed put(u64 source, u64 destination, u64 len_bytes, u64 timeout_ns) const {
    return push_put(kPut, source, destination, len_bytes, timeout_ns);
  }
  PORTWAY_FN Pushed put(u64 source, u64 destination, u64 len_bytes) const {
    return put(source, destination, len_bytes, fifo.timeout_ns);
  }

  // The same, then a signal that advances the peer's word by 1.
  PORTWAY_FN Pushed put_signal(u64 source, u64 destination, u64 len_bytes, u64 timeout_ns) const {
    return push_put(kPut | kSignal, source, destination, len_bytes, timeout_ns);
  }
  PORTWAY_FN Pushed put_signal(u64 source, u64 destination, u64 len_bytes) const {
    return put_signal(source, destination, len_bytes, fifo.timeout_ns);
  }

  // The same, then a wait until everything up to here has been delivered and the source may be reused.
  PORTWAY_FN Status put_signal_flush(u64 source, u64 destination, u64 len_bytes, u64 timeout_ns) const {
    const u64 start = platform::clock_ns();
    const u32 op = kPut | kSignal | kFlush;
    return flushed(push_put(op, source, destination, len_bytes, timeout_ns), start, timeout_ns);
  }
  PORTWAY_FN Status put_signal_flush(u64 source, u64 destination, u64 len_bytes) const {
    return put_signal_flush(source, destination, len_bytes, fifo.timeout_ns);
  }

  // Advances the peer's signal word by `n`, 1 to kMaxSize, after every earlier put.
  PORTWAY_FN Pushed signal_peer(u64 n, u64 timeout_ns) const {
    if (!is_valid() || n == 0 || n > kMaxSize) return {Status::kInvalid, 0};
    return push(fifo, detail::request(kSignal, channel, n, 0, 0), timeout_ns);
  }
  PORTWAY_FN Pushed signal_peer(u64 n = 1) const { return signal_peer(n, fifo.timeout_ns); }

  // Waits until every earlier put has been delivered and its source may be reused.
  PORTWAY_FN Status flush(u64 timeout_ns) const {
    if (!is_valid()) return Status::kInvalid;
    const u64 start = platform::clock_ns();
    return flushed(push(fifo, detail::request(kFlush, channel, 0, 0, 0), timeout_ns), start, timeout_ns);
  }
  PORTWAY_FN Status flush() const { return flush(fifo.timeout_ns); }

  // Waits for the peer's next signal and consumes it: as many waits return kOk as the peer's signals count.
  PORTWAY_FN Status wait(u64 timeout_ns) const {
    if (!is_valid() || !fifo.accepts(timeout_ns)) return Status::kInvalid;
    const u64 start = platform::clock_ns();
    for (;;) {
      const u64 count = platform::load_acquire_device(expected);
      const Status status = ended(portway::wait(signal, nullptr, count + 1, left(start, timeout_ns)).status);
      if (status != Status::kOk) return status;
      if (platform::compare_exchange_device(expected, count, count + 1) == count) return Status::kOk;
      // Another thread consumed that signal: it has made progress, and this one goes for the next.
    }
  }
  PORTWAY_FN Status wait() const { return wait(fifo.timeout_ns); }

  // Consumes the peer's next signal if it is there; kTimeout if it is not.
  PORTWAY_FN Status poll() const { return wait(0); }

  // Why the channel has ended: 0 it has not, otherwise `portway_proxy::ChannelError::code`. Reads host memory.
  PORTWAY_FN u64 error() const { return platform::load_acquire_system(frontier.stop); }

 private:
  PORTWAY_FN bool is_valid() const { return version == kChannelVersion; }

  PORTWAY_FN static Status ended(Status status) { return status == Status::kAborted ? Status::kFailed : status; }

  // What is left of a call's time, for the next step of it.
  PORTWAY_FN static u64 left(u64 start, u64 timeout_ns) {
    const u64 spent = platform::clock_ns() - start;
    return spent < timeout_ns ? timeout_ns - spent : 0;
  }

  PORTWAY_FN Status flushed(Pushed pushed, u64 start, u64 timeout_ns) const {
    if (pushed.status != Status::kOk) return pushed.status;
    return ended(portway::wait(frontier, nullptr, pushed.position + 1, left(start, timeout_ns)).status);
  }

  PORTWAY_FN Pushed push_put(u32 op, u64 source, u64 destination, u64 len_bytes, u64 timeout_ns) const {
    const bool fits = len_bytes != 0 && detail::inside(source, len_bytes, source_len_bytes) &&
                      detail::inside(destination, len_bytes, destination_len_bytes);
    if (!is_valid() || !fits || !fifo.accepts(timeout_ns)) return {Status::kInvalid, 0};
    if (len_bytes <= kMaxPutBytes) {
      return push(fifo, detail::request(op, channel, len_bytes, source, destination), timeout_ns);
    }
    const u64 start = platform::clock_ns();
    for (; len_bytes > kMaxPutBytes; len_bytes -= kMaxPutBytes) {
      const Trigger part = detail::request(kPut, channel, kMaxPutBytes, source, destination);
      const Pushed pushed = push(fifo, part, left(start, timeout_ns));
      if (pushed.status != Status::kOk) return pushed;
      source += kMaxPutBytes;
      destination += kMaxPutBytes;
    }
    return push(fifo, detail::request(op, channel, len_bytes, source, destination), left(start, timeout_ns));
  }
};

static_assert(sizeof(PortChannel) == 176, "the handle of portway_proxy::channel");

} // namespace portway

#endif // PORTWAY_PORT_CHANNEL_CUH
