// The GPU's part of the `put` layer, after the texts of port_channel.cuh and load.cu. Block 0 plays one end, block 1 the other. Every
// loop ends: by a count, by a time, or by the timeout of the call in it.
// The same as `pattern::word`.
__device__ u64 word(u64 number, u64 index) {
  return (number + 1) * 0x9e3779b97f4a7c15ull ^ index * 0xd6e8feb86659fd93ull;
}

// By all threads of a block.
__device__ void fill(u64 *words, u64 len, u64 number) {
  for (u64 i = threadIdx.x; i < len; i += blockDim.x) words[i] = word(number, i);
}

// By all threads of a block: whether a message is there. Ends with the block together.
__device__ bool is_whole(const u64 *words, u64 len, u64 number) {
  u64 wrong = 0;
  for (u64 i = threadIdx.x; i < len; i += blockDim.x) {
    wrong |= platform::load_relaxed_system(words + i) ^ word(number, i);
  }
  return !__syncthreads_or(wrong != 0);
}

struct End {
  PortChannel channel;
  u64 *source;
  const u64 *destination;
};

struct Plan {
  u64 len_bytes; // of a put
  u64 window;    // puts of a window
  u64 warmup;    // round trips or windows that do not count; they take a fifth of the limit at most
  u64 most;      // those that count
  u64 limit_ns;
  u64 check;   // fill and verify
  u64 corrupt; // the message of block 0 in which a bit is flipped
};

struct Done {
  u64 count; // round trips or windows, with those that do not count
  u64 counted;
  u64 wrong;       // messages that were not whole
  u64 statuses[2]; // of the call that ended a block, 0 if none failed
  u64 start_ns, end_ns, start_cycles, end_cycles;
  u64 stop; // block 0 has no more messages
};

static_assert(sizeof(End) == 192 && sizeof(Plan) == 56 && sizeof(Done) == 80, "as in put/gpu.rs");

// What thread 0 of a block decides for all of them.
__device__ u64 together(u64 value) {
  __shared__ u64 shared;
  __syncthreads();
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
}

__device__ u64 code(Status status) { return static_cast<u64>(status); }

__device__ u32 cycles_since(u64 start) { return saturated(clock64() - start); }

// Paces block 0. Lives in its thread 0.
struct Pace {
  u64 count = 0, counted = 0, begin_ns = platform::clock_ns();
  bool warm = true;

  __device__ bool is_over(const Plan &plan) {
    const u64 now = platform::clock_ns();
    if (warm && (count >= plan.warmup || now - begin_ns >= plan.limit_ns / 5)) {
      warm = false;
      begin_ns = now;
    }
    return !warm && (counted >= plan.most || now - begin_ns >= plan.limit_ns);
  }
};

// There and back, block 0: samples[2 * i] is the cycles of the counted round trip i, block 1 adds to samples[2 * i + 1]
// those that it spent between its wait and its put.
__device__ void lead_trips(const End &end, const Plan &plan, u32 *samples, Done *done) {
  Pace pace;
  u64 status = 0, wrong = 0;
  if (threadIdx.x == 0) {
    done->start_ns = platform::clock_ns();
    done->start_cycles = clock64();
  }
  for (u64 n = 0; !together(status || pace.is_over(plan)); n++) {
    if (plan.check) fill(end.source, plan.len_bytes / 8, 2 * n);
    __syncthreads();
    if (threadIdx.x == 0) {
      if (n == plan.corrupt) end.source[0] ^= 1;
      const u64 start = clock64();
      status = code(end.channel.put_signal(0, 0, plan.len_bytes).status);
      if (status == 0) status = code(end.channel.wait());
      samples[2 * n] = cycles_since(start);
      pace.count++;
      if (!pace.warm) pace.counted++;
    }
    if (together(status)) break;
    if (plan.check && !is_whole(end.destination, plan.len_bytes / 8, 2 * n + 1)) wrong++;
  }
  if (threadIdx.x == 0) {
    done->end_ns = platform::clock_ns();
    done->end_cycles = clock64();
    done->count = pace.count;
    done->counted = pace.counted;
    atomicAdd(&done->wrong, wrong);
    platform::store_release_device(&done->stop, 1);
    const u64 last = code(end.channel.signal_peer(1).status);
    done->statuses[0] = status ? status : last;
  }
}

__device__ void follow_trips(const End &end, const Plan &plan, u32 *samples, Done *done) {
  u64 status = 0, wrong = 0, start = 0;
  for (u64 n = 0;; n++) {
    if (threadIdx.x == 0) {
      status = code(end.channel.wait());
      start = clock64();
      if (status == 0 && platform::load_acquire_device(&done->stop)) status = ~0ull; // the end
    }
    if (together(status)) break;
    if (plan.check) {
      if (!is_whole(end.destination, plan.len_bytes / 8, 2 * n)) wrong++;
      fill(end.source, plan.len_bytes / 8, 2 * n + 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      samples[2 * n + 1] = cycles_since(start);
      status = code(end.channel.put_signal(0, 0, plan.len_bytes).status);
    }
    if (together(status)) break;
  }
  if (threadIdx.x == 0) {
    atomicAdd(&done->wrong, wrong);
    done->statuses[1] = status == ~0ull ? 0 : status;
  }
}

extern "C" __global__ void round_trips(End a, End b, Plan plan, u32 *samples, Done *done) {
  if (blockIdx.x == 0) {
    lead_trips(a, plan, samples, done);
  } else {
    follow_trips(b, plan, samples, done);
  }
}

// Windows, block 0: samples[2 * i] is the cycles of window i to its last push, samples[2 * i + 1] to the return of its
// flush. Each thread pushes its share of the puts.
__device__ void lead_windows(const End &end, const Plan &plan, u32 *samples, Done *done) {
  Pace pace;
  const u64 words = plan.len_bytes / 8;
  u64 status = 0;
  if (threadIdx.x == 0) {
    done->start_ns = platform::clock_ns();
    done->start_cycles = clock64();
  }
  for (u64 n = 0; !together(status || pace.is_over(plan)); n++) {
    if (plan.check) {
      for (u64 i = 0; i < plan.window; i++) fill(end.source + i * words, words, n * plan.window + i);
    }
    __syncthreads();
    if (threadIdx.x == 0 && n == plan.corrupt) end.source[0] ^= 1;
    __syncthreads();
    const u64 start = clock64();
    Status pushed = Status::kOk;
    for (u64 i = threadIdx.x; i < plan.window && pushed == Status::kOk; i += blockDim.x) {
      pushed = end.channel.put_signal(i * plan.len_bytes, i * plan.len_bytes, plan.len_bytes).status;
    }
    const bool failed = __syncthreads_or(pushed != Status::kOk);
    if (threadIdx.x == 0) {
      samples[2 * n] = cycles_since(start);
      status = failed ? code(pushed == Status::kOk ? Status::kFailed : pushed) : code(end.channel.flush());
      samples[2 * n + 1] = cycles_since(start);
      if (status == 0) status = code(end.channel.wait()); // the other end has looked
      pace.count++;
      if (!pace.warm) pace.counted++;
    }
  }
  if (threadIdx.x == 0) {
    done->end_ns = platform::clock_ns();
    done->end_cycles = clock64();
    done->count = pace.count;
    done->counted = pace.counted;
    platform::store_release_device(&done->stop, 1);
    const u64 last = code(end.channel.signal_peer(plan.window).status);
    done->statuses[0] = status ? status : last;
  }
}

__device__ void follow_windows(const End &end, const Plan &plan, Done *done) {
  const u64 words = plan.len_bytes / 8;
  u64 status = 0, wrong = 0;
  for (u64 n = 0;; n++) {
    if (threadIdx.x == 0) {
      // One wait for the signals of a whole window.
      status = code(wait(end.channel.signal, nullptr, (n + 1) * plan.window, end.channel.fifo.timeout_ns).status);
      if (status == 0 && platform::load_acquire_device(&done->stop)) status = ~0ull; // the end
    }
    if (together(status)) break;
    for (u64 i = 0; plan.check && i < plan.window; i++) {
      if (!is_whole(end.destination + i * words, words, n * plan.window + i)) wrong++;
    }
    if (threadIdx.x == 0) status = code(end.channel.signal_peer(1).status);
    if (together(status)) break;
  }
  if (threadIdx.x == 0) {
    atomicAdd(&done->wrong, wrong);
    done->statuses[1] = status == ~0ull ? 0 : status;
  }
}

extern "C" __global__ void windows(End a, End b, Plan plan, u32 *samples, Done *done) {
  if (blockIdx.x == 0) {
    lead_windows(a, plan, samples, done);
  } else {
    follow_windows(b, plan, done);
  }
}

// Puts with signals under a load, each to the return of its flush. Every thread has a place of its own, which it fills before
// and looks at behind.
struct FlushedPuts {
  const End &from;
  const u64 *destination;
  const Plan &plan;
  u64 wrong;

  __device__ u64 first() const { return self() * (plan.len_bytes / 8); }
  __device__ u64 number(u64 n) const { return self() << 32 | n; }
  __device__ void prepare(u64 n, Sent &) const {
    u64 *const mine = from.source + first();
    for (u64 i = 0; plan.check && i < plan.len_bytes / 8; i++) mine[i] = word(number(n), i);
    if (n == plan.corrupt && self() == 0) mine[0] ^= 1;
  }
  __device__ Status carry_out(u64) const {
    const u64 offset_bytes = self() * plan.len_bytes;
    return from.channel.put_signal_flush(offset_bytes, offset_bytes, plan.len_bytes);
  }
  __device__ void verify(u64 n) {
    u64 differs = 0;
    for (u64 i = 0; plan.check && i < plan.len_bytes / 8; i++) {
      differs |= platform::load_relaxed_system(destination + first() + i) ^ word(number(n), i);
    }
    wrong += differs != 0;
  }
};

extern "C" __global__ void offer_puts(End a, End b, Plan plan, unsigned long long *wrong, Offer offer) {
  FlushedPuts puts = {a, b.destination, plan, 0};
  offer_load(offer, puts);
  if (puts.wrong) atomicAdd(wrong, puts.wrong);
}
