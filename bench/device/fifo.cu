// The GPU's part of the `fifo` layer. Every loop ends: by a count, by a time, or by the timeout of the call in it.
#include "portway/fifo.cuh"

using namespace portway;

constexpr u64 kNever = ~0ull;

__device__ u64 self() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }

// The same as `payload::trigger`: the second word follows from the first.
__device__ Trigger trigger(u64 producer, u64 n) {
  const u64 first = producer << 46 | n;
  return {{first, first * 0x9e3779b97f4a7c15ull >> 1}};
}

__device__ u64 weight(const Trigger &trigger) { return trigger.words[0] + 3 * trigger.words[1]; }

// What a thread has pushed.
struct Sent {
  u64 count;
  u64 sum; // of the weights of its triggers, before one was corrupted
  u64 start_ns, end_ns;
  u64 status; // of the call that ended it, 0 if none failed
};

// Pushes until `most` triggers or `limit_ns` are over. The thread 0 flips a bit of its trigger `corrupt`.
struct Plan {
  u64 most, limit_ns, corrupt;

  __device__ bool is_over(const Sent &sent) const {
    return sent.status != 0 || sent.count >= most || platform::clock_ns() - sent.start_ns >= limit_ns;
  }
  __device__ Trigger next(Sent &sent) const {
    Trigger next = trigger(self(), sent.count);
    sent.sum += weight(next);
    if (sent.count++ == corrupt && self() == 0) next.words[1] ^= 1;
    return next;
  }
};

__device__ Sent begin() { return {0, 0, platform::clock_ns(), 0, 0}; }

__device__ void end(Sent mine, Sent *sent) {
  mine.end_ns = platform::clock_ns();
  sent[self()] = mine;
}

// Looks at the clock once in so many pushes.
constexpr u32 kPushes = 16;

extern "C" __global__ void push_scalar(FifoHandle fifo, Plan plan, Sent *sent) {
  Sent mine = begin();
  while (!plan.is_over(mine)) {
    for (u32 i = 0; i < kPushes && mine.count < plan.most && mine.status == 0; i++) {
      mine.status = static_cast<u64>(push(fifo, plan.next(mine)).status);
    }
  }
  end(mine, sent);
}

// By whole warps, whose lanes stay together.
extern "C" __global__ void push_warps(FifoHandle fifo, Plan plan, Sent *sent) {
  Sent mine = begin();
  while (!__any_sync(~0u, plan.is_over(mine))) {
    for (u32 i = 0; i < kPushes && mine.count < plan.most; i++) { // as often by each lane
      const Status status = push(fifo, plan.next(mine)).status;
      if (mine.status == 0) mine.status = static_cast<u64>(status);
      __syncwarp();
    }
  }
  end(mine, sent);
}

extern "C" __global__ void push_batches(FifoHandle fifo, Plan plan, Sent *sent, u64 batch) {
  constexpr u64 kMost = 64;
  Trigger triggers[kMost];
  Sent mine = begin();
  if (batch > kMost) mine.status = static_cast<u64>(Status::kInvalid);
  while (!plan.is_over(mine)) {
    for (u64 i = 0; i < batch; i++) triggers[i] = plan.next(mine);
    mine.status = static_cast<u64>(push_batch(fifo, triggers, batch).status);
  }
  end(mine, sent);
}

// One thread's round trips: in cycles each, and what tells how long a cycle is.
struct Trips {
  u64 count; // with those before the counted ones
  u64 counted;
  u64 status;
  u64 start_ns, end_ns, start_cycles, end_cycles;
};

__device__ u32 saturated(u64 value) { return value < ~0u ? static_cast<u32>(value) : ~0u; }

struct TripPlan {
  u64 warmup, most, limit_ns; // the warm-up takes a fifth of the limit at most
};

static_assert(sizeof(Sent) == 40 && sizeof(Plan) == 24, "as in fifo/gpu");
static_assert(sizeof(Trips) == 56 && sizeof(TripPlan) == 24, "as in fifo/gpu/latency.rs");

// Takes round trips until the plan is over; `trip(n)` returns the status of the n-th. The counted ones go to `cycles`.
template <class Trip> __device__ void take_trips(const TripPlan &plan, u32 *cycles, Trips *trips, Trip trip) {
  Trips mine = {0, 0, 0, platform::clock_ns(), 0, static_cast<u64>(clock64()), 0};
  const u64 limits[2] = {plan.limit_ns / 5, plan.limit_ns}, counts[2] = {plan.warmup, plan.most};
  for (u32 phase = 0; phase < 2; phase++) {
    const u64 begin_ns = platform::clock_ns();
    for (u64 i = 0; i < counts[phase] && mine.status == 0; i++) {
      const u64 start = clock64();
      mine.status = static_cast<u64>(trip(mine.count));
      const u32 taken = saturated(clock64() - start);
      mine.count++;
      if (phase == 1) cycles[mine.counted++] = taken;
      if (platform::clock_ns() - begin_ns >= limits[phase]) break;
    }
  }
  mine.end_ns = platform::clock_ns();
  mine.end_cycles = clock64();
  *trips = mine;
}

extern "C" __global__ void push_sync(FifoHandle fifo, TripPlan plan, u32 *cycles, Trips *trips) {
  take_trips(plan, cycles, trips, [&](u64 n) {
    const Pushed pushed = push(fifo, trigger(0, n));
    return pushed.status == Status::kOk ? sync(fifo, pushed.position) : pushed.status;
  });
}

// The same way without a FIFO: a number goes to the processor in one pinned word and comes back in another.
extern "C" __global__ void ping_pong(u64 *there, const u64 *back, u64 timeout_ns, TripPlan plan, u32 *cycles,
                                     Trips *trips) {
  take_trips(plan, cycles, trips, [&](u64 n) {
    platform::store_release_system(there, n + 1);
    const u64 start = platform::clock_ns();
    for (u32 look = 1; platform::load_acquire_system(back) != n + 1; look++) {
      if (look % 1024 == 0 && platform::clock_ns() - start >= timeout_ns) return Status::kTimeout;
    }
    return Status::kOk;
  });
}

// When all threads of the next kernel begin.
extern "C" __global__ void set_start(u64 *start_ns) { *start_ns = platform::clock_ns() + 1000000; }

// Offers a load: the triggers of all threads are due one every `period_ps`. Each is timed from when it is due, not from
// when its thread gets to it, to the return of its sync; so a thread that lags shows. Gives up at twice the time. The
// blocks share the `count` FIFOs out among them.
extern "C" __global__ void offer(const FifoHandle *fifos, u64 count, const u64 *start_ns, u64 period_ps, u64 each,
                                 u64 limit_ns, u32 *samples_ns, Sent *sent) {
  const FifoHandle fifo = fifos[blockIdx.x % count];
  const u64 start = *start_ns, threads = static_cast<u64>(gridDim.x) * blockDim.x;
  Sent mine = begin();
  mine.start_ns = start;
  while (mine.count < each && mine.status == 0 && platform::clock_ns() < start + 2 * limit_ns) {
    const u64 due = start + (mine.count * threads + self()) * period_ps / 1000;
    while (platform::clock_ns() < due) {
    }
    const Trigger next = trigger(self(), mine.count);
    const Pushed pushed = push(fifo, next);
    const Status status = pushed.status == Status::kOk ? sync(fifo, pushed.position) : pushed.status;
    mine.status = static_cast<u64>(status);
    samples_ns[self() * each + mine.count] = saturated(platform::clock_ns() - due);
    mine.sum += weight(next);
    mine.count++;
  }
  end(mine, sent);
}

// The smallest step of the global timer that shows.
extern "C" __global__ void timer_step(u64 *step_ns) {
  u64 least = kNever, last = platform::clock_ns();
  for (u32 i = 0; i < 100000; i++) {
    const u64 now = platform::clock_ns();
    if (now != last && now - last < least) least = now - last;
    last = now;
  }
  *step_ns = least;
}
