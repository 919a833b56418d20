// The producers' end of a FIFO, for kernels.
//
// A trigger is two words of 63 bits. A push takes a position, waits for room, and stores the slot with release at system
// scope; bit 63 of each word is the lap's parity, by which the consumer knows a slot that is new and whole. Every call
// returns a status: it ends with success, when the host aborts, or after the timeout. See ARCHITECTURE.md for the life
// of a trigger and `portway_fifo::Producer`, the same protocol in Rust.
#ifndef PORTWAY_FIFO_CUH
#define PORTWAY_FIFO_CUH

#include "portway/platform.cuh"

namespace portway {

constexpr u32 kHandleVersion = 1;
constexpr u64 kMaxTimeoutNs = 3600ull * 1000 * 1000 * 1000; // nothing waits longer than an hour
constexpr u64 kParity = 1ull << 63;

enum class Status : u32 {
  kOk = 0,
  kTimeout = 1,         // the time was over
  kAborted = 2,         // the FIFO was aborted (from a wait; a push had taken a position, so it breaks the FIFO)
  kBrokenByTimeout = 3, // a push gave up at the position that comes with the status; nothing after it is delivered
  kBrokenByAbort = 4,   // the same, because of an abort
  kInvalid = 5,         // an argument was refused; nothing happened
  kFailed = 6,          // a channel has ended; its error code says why
};

struct Trigger {
  u64 words[2];
};

// A word that another agent advances, waited for through a copy that is cheap to read: see `wait`.
struct WatchHandle {
  const u64 *value; // the word waited for
  const u64 *stop;  // ends every wait when not 0
  u64 *seen;        // device memory: the elected reader's copies of both, side by side
  u64 *reader;      // device memory: 1 while a thread is the elected reader
};

// Plain data, passed to a kernel by value. `portway_fifo::FifoHandle` is the same struct.
struct FifoHandle {
  u32 version;
  u32 shift; // binary logarithm of the number of slots
  u64 *slots;
  u64 *head;
  WatchHandle tail;
  u64 *flushed; // the tail's replica in device memory, written by the flusher alone; null if there is none
  u64 *broken;
  u64 timeout_ns;

  PORTWAY_FN u64 size() const { return 1ull << shift; }
  PORTWAY_FN u64 *slot(u64 position) const { return slots + 2 * (position & (size() - 1)); }
  PORTWAY_FN u64 parity(u64 position) const { return ~(position >> shift) << 63; }
  // How far the tail must have come before the slot of `position` may be written.
  PORTWAY_FN u64 room(u64 position) const { return position + 1 - size(); }
  PORTWAY_FN bool accepts(u64 timeout) const { return version == kHandleVersion && timeout <= kMaxTimeoutNs; }
};

static_assert(sizeof(WatchHandle) == 32 && sizeof(FifoHandle) == 80, "the handles of portway_fifo::layout");

struct Pushed {
  Status status;
  u64 position; // where the trigger stands, or with kTimeout would have; with kBroken*, where the FIFO broke
};

// Positions and counters wrap around at 2^64 and are compared by their wrapping difference.
PORTWAY_FN bool reached(u64 counter, u64 target) { return static_cast<long long>(counter - target) >= 0; }

struct Waited {
  Status status; // kOk, kTimeout, or kAborted when the gate is not 0
  u64 gate;
};

namespace detail {

// Carries a stop word over into the gate; returns what the gate then holds. The first reason stays.
PORTWAY_FN u64 close(const WatchHandle &watch, u64 stop) {
  const u64 gate = platform::compare_exchange_device(watch.seen + 1, 0, stop);
  return gate ? gate : stop;
}

// What the elected reader does: reads the word until it has reached `target`, and publishes what it sees. False if it is
// stopped, late, or has looked often enough.
PORTWAY_FN bool read(const WatchHandle &watch, u64 copied, u64 target, u64 deadline, platform::Pause &pause) {
  for (u32 look = 0; look < platform::kReaderLooks; look++) {
    // Both loads are on their way at once, so a look costs one trip over the bus.
    const u64 stop = platform::load_relaxed_system(watch.stop);
    const u64 value = platform::load_acquire_system(watch.value);
    // Now and then without need as well: the last reader's store may have landed on top of this one's.
    if (value != copied || look % 16 == 15) platform::store_release_device(watch.seen, value);
    copied = value;
    if (stop) close(watch, platform::load_acquire_system(watch.stop));
    if (reached(value, target)) return true;
    if (stop || reached(platform::clock_ns(), deadline)) return false;
    if (look % 8 == 7) pause.wait(true);
  }
  return false;
}

} // namespace detail

// Waits until the watched word has reached `target`.
//
// At most one waiter at a time, the elected reader, reads the word itself; it publishes what it saw in device memory
// with release, and the others watch that with acquire. When all of tens of thousands of threads read a word in pinned
// memory over PCIe, they share the bus and the FIFO stands nearly still.
// `flushed` may be null; otherwise it is a second copy that somebody else keeps fresh.
//
// The word wins over the stop word and over the clock: before a wait gives up it looks at the word itself. A timeout of
// zero is one look.
PORTWAY_WAIT_FN Waited wait(WatchHandle watch, const u64 *flushed, u64 target, u64 timeout_ns) {
  const u64 deadline = platform::clock_ns() + timeout_ns;
  platform::Pause pause;
  for (;;) {
    const Pair copy = platform::load_pair_acquire_device(watch.seen);
    if (reached(copy.first, target)) return {Status::kOk, 0};
    if (flushed && reached(platform::load_acquire_system(flushed), target)) return {Status::kOk, 0};
    u64 gate = copy.second;
    if (gate || reached(platform::clock_ns(), deadline)) {
      // The copy is as old as the last election. The stop word first, then the word: it has every value from before.
      const u64 stop = gate ? 0 : platform::load_acquire_system(watch.stop);
      if (reached(platform::load_acquire_system(watch.value), target)) return {Status::kOk, 0};
      if (stop) gate = detail::close(watch, stop);
      return {gate ? Status::kAborted : Status::kTimeout, gate};
    }
    const bool elected = platform::elect_device(watch.reader);
    if (elected) {
      const bool done = detail::read(watch, copy.first, target, deadline, pause);
      // Relaxed, so this reader's copy may land after the next one's. A copy that is behind is not wrong, and `read`
      // mends it.
      platform::store_relaxed_device(watch.reader, 0);
      if (done) return {Status::kOk, 0};
    }
    pause.wait(elected);
  }
}

namespace detail {

// The gate of a FIFO: 0 open, 1 aborted, otherwise the position of the break (its low 62 bits) over the cause.
constexpr u64 kGateAborted = 1;
constexpr u64 kGateBrokenByTimeout = 2;
constexpr u64 kGateBrokenByAbort = 3;

// `near` is any position of the stream; it gives the two bits that the gate has no room for.
PORTWAY_FN Pushed closed(u64 gate, u64 near) {
  const u64 cause = gate & 3;
  if (cause == kGateAborted) return {Status::kAborted, 0};
  const long long ahead = static_cast<long long>(((gate >> 2) - near) << 2) >> 2;
  const u64 position = near + static_cast<u64>(ahead);
  return {cause == kGateBrokenByTimeout ? Status::kBrokenByTimeout : Status::kBrokenByAbort, position};
}

// Records that the position `first` will never be published. The first record stays, for all to read.
PORTWAY_FN Pushed give_up(const FifoHandle &fifo, Waited waited, u64 first) {
  const bool timeout = waited.status == Status::kTimeout;
  const u64 record = first << 2 | (timeout ? kGateBrokenByTimeout : kGateBrokenByAbort);
  u64 *gate = fifo.tail.seen + 1;
  u64 expected = waited.gate;
  // An abort that nobody broke the FIFO in yet gives way to the break; a break stays.
  while (expected == 0 || expected == kGateAborted) {
    const u64 now = platform::compare_exchange_device(gate, expected, record);
    if (now == expected) {
      platform::store_release_system(fifo.broken, record);
      expected = record;
    } else {
      expected = now;
    }
  }
  return timeout ? Pushed{Status::kTimeout, first} : closed(expected, first);
}

// Takes `n` consecutive positions and waits until all their slots are free.
PORTWAY_FN Pushed take(const FifoHandle &fifo, u64 n, u64 timeout_ns) {
  // Both are on their way at once. Nothing has to be acquired with the copy: the slot is stored only if it says that
  // there is room, and a store is not made before what decides about it is known.
  const u64 first = platform::fetch_add_relaxed_device(fifo.head, n);
  const Pair copy = platform::load_pair_relaxed_device(fifo.tail.seen);
  if (copy.second) return give_up(fifo, {Status::kAborted, copy.second}, first);
  const u64 room = fifo.room(first + n - 1);
  if (!reached(copy.first, room)) {
    const Waited waited = wait(fifo.tail, fifo.flushed, room, timeout_ns);
    if (waited.status != Status::kOk) return give_up(fifo, waited, first);
  }
  return {Status::kOk, first};
}

PORTWAY_FN bool fits(const Trigger &trigger) { return ((trigger.words[0] | trigger.words[1]) & kParity) == 0; }

} // namespace detail

// Pushes one trigger, by one thread. What the thread did before is visible to whoever handles the trigger.
//
// kInvalid if bit 63 of a word is set (it is the ring's) or the timeout is over kMaxTimeoutNs. A push that gives up
// had taken its position, so the FIFO is broken from there on: later calls say so and the host can reset it.
PORTWAY_WAIT_FN Pushed push(const FifoHandle &fifo, Trigger trigger, u64 timeout_ns) {
  if (!fifo.accepts(timeout_ns) || !detail::fits(trigger)) return {Status::kInvalid, 0};
  const Pushed taken = detail::take(fifo, 1, timeout_ns);
  if (taken.status != Status::kOk) return taken;
  const u64 parity = fifo.parity(taken.position);
  platform::store_slot(fifo.slot(taken.position), trigger.words[0] | parity, trigger.words[1] | parity);
  return taken;
}
PORTWAY_FN Pushed push(const FifoHandle &fifo, Trigger trigger) { return push(fifo, trigger, fifo.timeout_ns); }

// Pushes one trigger a lane, by all lanes of a warp that are converged here: one step of the head and one wait for all
// of them, neighbouring lanes in neighbouring slots. All lanes give the same FIFO. The timeout is that of the lowest lane
// with a valid trigger; a lane whose trigger is invalid gets kInvalid, and the others go on.
PORTWAY_WAIT_FN Pushed push_warp(const FifoHandle &fifo, Trigger trigger, u64 timeout_ns) {
  const u32 active = platform::active_lanes();
  const bool valid = fifo.accepts(timeout_ns) && detail::fits(trigger);
  const u32 lanes = platform::ballot(active, valid);
  if (lanes == 0) return {Status::kInvalid, 0};
  const u32 leader = platform::lowest(lanes);
  const u32 self = platform::lane();
  Pushed taken = {Status::kOk, 0};
  if (self == leader) taken = detail::take(fifo, platform::count(lanes), timeout_ns);
  platform::sync_lanes(active);
  taken.status = static_cast<Status>(platform::broadcast(active, static_cast<u32>(taken.status), leader));
  taken.position = platform::broadcast(active, taken.position, leader);
  if (!valid) return {Status::kInvalid, 0};
  if (taken.status == Status::kOk || taken.status == Status::kTimeout) {
    taken.position += platform::count(lanes & ((1u << self) - 1));
  }
  if (taken.status != Status::kOk) return taken;
  const u64 parity = fifo.parity(taken.position);
  platform::store_slot(fifo.slot(taken.position), trigger.words[0] | parity, trigger.words[1] | parity);
  return taken;
}
PORTWAY_FN Pushed push_warp(const FifoHandle &fifo, Trigger trigger) {
  return push_warp(fifo, trigger, fifo.timeout_ns);
}

// Pushes `n` triggers, at most as many as the ring has slots, by one thread to consecutive positions; returns the first.
// One step of the head, one wait and one fence for all of them.
PORTWAY_WAIT_FN Pushed push_batch(const FifoHandle &fifo, const Trigger *triggers, u64 n, u64 timeout_ns) {
  if (!fifo.accepts(timeout_ns) || n == 0 || n > fifo.size()) return {Status::kInvalid, 0};
  for (u64 i = 0; i < n; i++) {
    if (!detail::fits(triggers[i])) return {Status::kInvalid, 0};
  }
  const Pushed taken = detail::take(fifo, n, timeout_ns);
  if (taken.status != Status::kOk) return taken;
  platform::slots_fence();
  for (u64 i = 0; i < n; i++) {
    const u64 position = taken.position + i;
    const u64 parity = fifo.parity(position);
    platform::store_slot_after_fence(fifo.slot(position), triggers[i].words[0] | parity, triggers[i].words[1] | parity);
  }
  return taken;
}
PORTWAY_FN Pushed push_batch(const FifoHandle &fifo, const Trigger *triggers, u64 n) {
  return push_batch(fifo, triggers, n, fifo.timeout_ns);
}

// Waits until the consumer has handed on the trigger at `position`. What it did with it is then visible. A sync that
// gives up breaks nothing.
PORTWAY_WAIT_FN Status sync(const FifoHandle &fifo, u64 position, u64 timeout_ns) {
  if (!fifo.accepts(timeout_ns)) return Status::kInvalid;
  const Waited waited = wait(fifo.tail, fifo.flushed, position + 1, timeout_ns);
  return waited.status == Status::kAborted ? detail::closed(waited.gate, position).status : waited.status;
}
PORTWAY_FN Status sync(const FifoHandle &fifo, u64 position) { return sync(fifo, position, fifo.timeout_ns); }

} // namespace portway

#endif // PORTWAY_FIFO_CUH
