// The GPU's part of the `fifo` layer, after the text of load.cu. Every loop ends: by a count, by a time, or by the timeout of
// the call in it.
constexpr u64 kNever = ~0ull;

// The same as `payload::trigger`: the second word follows from the first.
__device__ Trigger trigger(u64 producer, u64 n) {
  const u64 first = producer << 46 | n;
  return {{first, first * 0x9e3779b97f4a7c15ull >> 1}};
}

__device__ u64 weight(const Trigger &trigger) { return trigger.words[0] + 3 * trigger.words[1]; }

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

struct TripPlan {
  u64 warmup, most, limit_ns; // the warm-up takes a fifth of the limit at most
  u64 corrupt;                // the trigger of which a bit is flipped
};

static_assert(sizeof(Plan) == 24, "as in fifo/gpu/throughput.rs");
static_assert(sizeof(Trips) == 56 && sizeof(TripPlan) == 32, "as in fifo/gpu/latency.rs");

// Takes round trips until the plan is over; `trip(n)` returns the status of the n-th.
template <class Trip> __device__ void take_trips(const TripPlan &plan, u32 *cycles, Trips *trips, Trip trip) {
  Trips mine = {0, 0, 0, platform::clock_ns(), 0, static_cast<u64>(clock64()), 0};
  const u64 limits[2] = {plan.limit_ns / 5, plan.limit_ns}, counts[2] = {plan.warmup, plan.most};
  for (u32 phase = 0; phase < 2; phase++) {
    const u64 begin_ns = platform::clock_ns();
    for (u64 i = 0; i < counts[phase] && mine.status == 0; i++) {
      const u64 start = clock64();
      mine.status = static_cast<u64>(trip(mine.count));
      cycles[mine.count++] = saturated(clock64() - start);
      mine.counted += phase;
      if (platform::clock_ns() - begin_ns >= limits[phase]) break;
    }
  }
  mine.end_ns = platform::clock_ns();
  mine.end_cycles = clock64();
  *trips = mine;
}

extern "C" __global__ void push_sync(FifoHandle fifo, TripPlan plan, u32 *cycles, Trips *trips) {
  take_trips(plan, cycles, trips, [&](u64 n) {
    Trigger next = trigger(0, n);
    next.words[1] ^= n == plan.corrupt;
    const Pushed pushed = push(fifo, next);
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

// Pushes, each to the return of its sync.
struct SyncedPushes {
  FifoHandle fifo;
  u64 corrupt; // the trigger of thread 0 of which a bit is flipped

  __device__ void prepare(u64 n, Sent &sent) const { sent.sum += weight(trigger(self(), n)); }
  __device__ Status carry_out(u64 n) const {
    Trigger next = trigger(self(), n);
    next.words[1] ^= n == corrupt && self() == 0;
    const Pushed pushed = push(fifo, next);
    return pushed.status == Status::kOk ? sync(fifo, pushed.position) : pushed.status;
  }
  __device__ void verify(u64) const {}
};

// The blocks share the `count` FIFOs out among them.
extern "C" __global__ void offer_pushes(const FifoHandle *fifos, u64 count, u64 corrupt, Offer offer) {
  SyncedPushes pushes = {fifos[blockIdx.x % count], corrupt};
  offer_load(offer, pushes);
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
