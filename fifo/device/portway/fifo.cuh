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
  Status status; // kOk, kTimeout, kAborted when the gate is not 0, or kInvalid
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
template <class Done>
PORTWAY_FN bool read(const WatchHandle &watch, u64 copied, u64 target, u64 deadline, Done done) {
  for (u32 look = 0; look < platform::kReaderLooks; look++) {
    // Both loads are on their way at once, so a look costs one trip over the bus.
    const u64 stop = platform::load_relaxed_system(watch.stop);
    const u64 value = platform::load_acquire_system(watch.value);
    // Now and then without need as well: the last reader's store may have landed on top of this one's.
    if (value != copied || look % 16 == 15) platform::store_release_device(watch.seen, value);
    copied = value;
    if (reached(value, target)) {
      platform::store_relaxed_device(watch.reader, 0);
      done();
      if (stop) close(watch, platform::load_acquire_system(watch.stop));
      return true;
    }
    if (stop) close(watch, platform::load_acquire_system(watch.stop));
    if (stop || reached(platform::clock_ns(), deadline)) break;
    if (look % 8 == 7) platform::yield();
  }
  // Relaxed, so this reader's copy may land after the next one's. A copy that is behind is not wrong, and the next reader
  // mends it.
  platform::store_relaxed_device(watch.reader, 0);
  return false;
}

// Waits until the word has reached `target`, from a look at the copies on, and calls `done` at once when it has: before
// anything at which the lanes of a warp meet again. Other lanes may be waiting for what a lane does in there, and where
// lanes that have parted meet, they were seen to hold each other up for good. For the same reason no lane waits for others
// by a shuffle or a ballot.
template <class Done>
PORTWAY_FN Waited wait(const WatchHandle &watch, const u64 *flushed, Pair copy, u64 target, u64 timeout_ns, Done done) {
  u64 deadline = 0;
  platform::Pause pause;
  for (bool first = true;; first = false) {
    if (reached(copy.first, target) || (flushed && reached(platform::load_acquire_system(flushed), target))) {
      done();
      return {Status::kOk, 0};
    }
    const u64 now = platform::clock_ns();
    if (first) deadline = now + timeout_ns;
    u64 gate = copy.second;
    if (gate || reached(now, deadline)) {
      // The copy is as old as the last election. The stop word first, then the word: it has every value from before.
      const u64 stop = gate ? 0 : platform::load_acquire_system(watch.stop);
      if (reached(platform::load_acquire_system(watch.value), target)) {
        done();
        return {Status::kOk, 0};
      }
      if (stop) gate = close(watch, stop);
      return {gate ? Status::kAborted : Status::kTimeout, gate};
    }
    const bool elected = platform::speaks(watch.reader) && platform::elect_device(watch.reader);
    if (elected && read(watch, copy.first, target, deadline, done)) return {Status::kOk, 0};
    pause.wait(elected);
    copy = platform::load_pair_acquire_device(watch.seen);
  }
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
// zero is one look, one over kMaxTimeoutNs is kInvalid.
PORTWAY_WAIT_FN Waited wait(WatchHandle watch, const u64 *flushed, u64 target, u64 timeout_ns) {
  if (timeout_ns > kMaxTimeoutNs) return {Status::kInvalid, 0};
  return detail::wait(watch, flushed, platform::load_pair_acquire_device(watch.seen), target, timeout_ns, [] {});
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

// Consecutive positions, and the tail and the gate as they were seen when these were taken.
struct Taken {
  u64 first;
  Pair copy;
};

PORTWAY_FN Taken take(const FifoHandle &fifo, u64 n) {
  // Both are on their way at once. Nothing has to be acquired with the copy: the slot is stored only if it says that
  // there is room, and a store is not made before what decides about it is known.
  const u64 first = platform::fetch_add_relaxed_device(fifo.head, n);
  return {first, platform::load_pair_relaxed_device(fifo.tail.seen)};
}

// Whether the slots of the `n` positions were free.
PORTWAY_FN bool had_room(const FifoHandle &fifo, const Taken &taken, u64 n) {
  return taken.copy.second == 0 && reached(taken.copy.first, fifo.room(taken.first + n - 1));
}

// Waits until the slots of the `n` positions are free, and calls `store` at once when they are.
template <class Store>
PORTWAY_FN Pushed store_late(const FifoHandle &fifo, const Taken &taken, u64 n, u64 timeout_ns, Store store) {
  const u64 gate = taken.copy.second;
  if (gate) return give_up(fifo, {Status::kAborted, gate}, taken.first);
  const u64 room = fifo.room(taken.first + n - 1);
  const Waited waited = wait(fifo.tail, fifo.flushed, taken.copy, room, timeout_ns, store);
  if (waited.status != Status::kOk) return give_up(fifo, waited, taken.first);
  return {Status::kOk, taken.first};
}

PORTWAY_FN bool fits(const Trigger &trigger) { return ((trigger.words[0] | trigger.words[1]) & kParity) == 0; }

PORTWAY_FN void store(const FifoHandle &fifo, u64 position, const Trigger &trigger) {
  const u64 parity = fifo.parity(position);
  platform::store_slot(fifo.slot(position), trigger.words[0] | parity, trigger.words[1] | parity);
}

PORTWAY_FN void store_batch(const FifoHandle &fifo, u64 first, const Trigger *triggers, u64 n) {
  platform::slots_fence();
  for (u64 i = 0; i < n; i++) {
    const u64 parity = fifo.parity(first + i);
    platform::store_slot_after_fence(fifo.slot(first + i), triggers[i].words[0] | parity,
                                     triggers[i].words[1] | parity);
  }
}

// Pushes that found no room.
PORTWAY_WAIT_FN Pushed push_late(FifoHandle fifo, Taken taken, Trigger trigger, u64 timeout_ns) {
  return store_late(fifo, taken, 1, timeout_ns, [&] { store(fifo, taken.first, trigger); });
}
PORTWAY_WAIT_FN Pushed push_batch_late(FifoHandle fifo, Taken taken, const Trigger *triggers, u64 n, u64 timeout_ns) {
  return store_late(fifo, taken, n, timeout_ns, [&] { store_batch(fifo, taken.first, triggers, n); });
}

} // namespace detail

// Pushes one trigger. What the thread did before is visible to whoever handles the trigger.
//
// Also what a whole warp calls: its lanes get neighbouring slots, and one of them reads for all.
//
// kInvalid if bit 63 of a word is set (it is the ring's) or the timeout is over kMaxTimeoutNs. A push that gives up
// had taken its position, so the FIFO is broken from there on: later calls say so and the host can reset it.
PORTWAY_FN Pushed push(const FifoHandle &fifo, Trigger trigger, u64 timeout_ns) {
  if (!fifo.accepts(timeout_ns) || !detail::fits(trigger)) return {Status::kInvalid, 0};
  const detail::Taken taken = detail::take(fifo, 1);
  if (!detail::had_room(fifo, taken, 1)) return detail::push_late(fifo, taken, trigger, timeout_ns);
  detail::store(fifo, taken.first, trigger);
  return {Status::kOk, taken.first};
}
PORTWAY_FN Pushed push(const FifoHandle &fifo, Trigger trigger) { return push(fifo, trigger, fifo.timeout_ns); }

// Pushes `n` triggers, at most as many as the ring has slots, by one thread to consecutive positions; returns the first.
// One step of the head, one wait and one fence for all of them.
PORTWAY_FN Pushed push_batch(const FifoHandle &fifo, const Trigger *triggers, u64 n, u64 timeout_ns) {
  if (!fifo.accepts(timeout_ns) || n == 0 || n > fifo.size()) return {Status::kInvalid, 0};
  for (u64 i = 0; i < n; i++) {
    if (!detail::fits(triggers[i])) return {Status::kInvalid, 0};
  }
  const detail::Taken taken = detail::take(fifo, n);
  if (!detail::had_room(fifo, taken, n)) return detail::push_batch_late(fifo, taken, triggers, n, timeout_ns);
  detail::store_batch(fifo, taken.first, triggers, n);
  return {Status::kOk, taken.first};
}
PORTWAY_FN Pushed push_batch(const FifoHandle &fifo, const Trigger *triggers, u64 n) {
  return push_batch(fifo, triggers, n, fifo.timeout_ns);
}

// Waits until the consumer has handed on the trigger at `position`. What it did with it is then visible. A sync that
// gives up breaks nothing.
PORTWAY_FN Status sync(const FifoHandle &fifo, u64 position, u64 timeout_ns) {
  if (!fifo.accepts(timeout_ns)) return Status::kInvalid;
  const Waited waited = wait(fifo.tail, fifo.flushed, position + 1, timeout_ns);
  return waited.status == Status::kAborted ? detail::closed(waited.gate, position).status : waited.status;
}
PORTWAY_FN Status sync(const FifoHandle &fifo, u64 position) { return sync(fifo, position, fifo.timeout_ns); }

} // namespace portway

#endif // PORTWAY_FIFO_CUH
