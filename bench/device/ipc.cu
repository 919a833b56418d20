// The GPUs' part of the `ipc` layer, after the text of port_channel.cuh. Each end is a launch of its own, of one block of
// 1,024 threads, on a device of its own if there are two. Every loop ends: by a count, or by the timeout of the call in it.
using namespace portway;

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
  u64 len_bytes; // of a put; 0 for signals alone
  u64 puts;      // of a window
  u64 count;     // round trips, or windows
  u64 follows;   // which end this is: 0 begins, 1 answers
  u64 check;     // fill and verify
  u64 corrupt;   // the message of the first end in which a bit is flipped
};

struct Done {
  u64 wrong;  // messages that were not whole
  u64 status; // of the call that ended the kernel, 0 if none failed
  u64 start_ns, end_ns, start_cycles, end_cycles;
};

static_assert(sizeof(End) == 192 && sizeof(Plan) == 48 && sizeof(Done) == 48, "as in ipc/kernels.rs");

// What thread 0 of a block decides for all of them.
__device__ u64 together(u64 value) {
  __shared__ u64 shared;
  __syncthreads();
  if (threadIdx.x == 0) shared = value;
  __syncthreads();
  return shared;
}

__device__ u64 code(Status status) { return static_cast<u64>(status); }

// Where a block says that it has come to the gate, and where the host says that all have. `Gate` of ipc/gate.rs.
struct Gate {
  u64 *ready;
  const u64 *go;
};

// Waits until the gate is open for the `nth` time. By one thread of a block.
__device__ u64 pass(const Gate &gate, u64 nth) {
  platform::store_release_system(gate.ready, nth);
  const u64 entry = platform::clock_ns();
  while (platform::load_acquire_system(gate.go) < nth) {
    if (platform::clock_ns() - entry > 20000000000ull) return code(Status::kTimeout);
  }
  return 0;
}

__device__ void begin(Done *done) {
  done->start_ns = platform::clock_ns();
  done->start_cycles = clock64();
}

__device__ void end(Done *done, u64 status, u64 wrong) {
  done->end_ns = platform::clock_ns();
  done->end_cycles = clock64();
  done->status = status;
  done->wrong = wrong;
}

// A signal alone is corrupted by one too many.
__device__ u64 send(const End &end, const Plan &plan, bool corrupt) {
  if (plan.len_bytes == 0) return code(end.channel.signal_peer(corrupt ? 2 : 1).status);
  if (corrupt) end.source[0] ^= 1;
  return code(end.channel.put_signal(0, 0, plan.len_bytes).status);
}

// Whether as many signals have come as were waited for, where the peer sends none before it is answered. By one thread, the
// only one that waits. What is too much is found once.
__device__ bool is_counted(const PortChannel &channel) {
  const u64 come = platform::load_acquire_system(channel.signal.value);
  const u64 waited_for = platform::load_acquire_device(channel.expected);
  platform::store_release_device(channel.expected, come);
  return come == waited_for;
}

// There and back. cycles[n] is what the first end waited for the answer, and what the second spent on it.
extern "C" __global__ void __launch_bounds__(1024) trips(End self, Plan plan, Gate gate, u64 *cycles, Done *done) {
  const u64 words = plan.len_bytes / 8;
  u64 status = 0, wrong = 0;
  if (threadIdx.x == 0) {
    status = pass(gate, 1);
    begin(done);
  }
  const u64 count = together(status) ? 0 : plan.count;
  for (u64 n = 0; n < count; n++) {
    u64 start = 0;
    bool right = true;
    if (plan.follows) {
      if (threadIdx.x == 0) {
        status = code(self.channel.wait());
        start = clock64();
        if (plan.check) right = is_counted(self.channel);
      }
      if (together(status)) break;
      if (plan.check && !is_whole(self.destination, words, 2 * n)) right = false;
    }
    if (plan.check) fill(self.source, words, 2 * n + plan.follows);
    __syncthreads();
    if (threadIdx.x == 0) {
      if (!plan.follows) start = clock64();
      if (plan.follows) cycles[n] = clock64() - start;
      status = send(self, plan, !plan.follows && n == plan.corrupt);
      if (!plan.follows) {
        if (status == 0) status = code(self.channel.wait());
        cycles[n] = clock64() - start;
        if (plan.check) right = is_counted(self.channel);
      }
    }
    if (together(status)) break;
    if (!plan.follows && plan.check && !is_whole(self.destination, words, 2 * n + 1)) right = false;
    wrong += !right;
  }
  if (threadIdx.x == 0) end(done, status, wrong);
}

// A window: puts that land side by side, a signal with the last.
__device__ u64 send_window(const End &end, const Plan &plan) {
  u64 status = 0;
  for (u64 i = 0; i < plan.puts && status == 0; i++) {
    const u64 at = i * plan.len_bytes;
    const bool last = i + 1 == plan.puts;
    status = code(last ? end.channel.put_signal(at, at, plan.len_bytes).status
                       : end.channel.put(at, at, plan.len_bytes).status);
  }
  return status;
}

// Windows from the first end to the second, which signals back once it has looked. cycles[2 * n] is from the first push of
// window n to the last, cycles[2 * n + 1] to the return of its flush. plan.follows >= 2: both ends send, at the same time, and
// each window ends when the peer's has come as well.
extern "C" __global__ void __launch_bounds__(1024) windows(End self, Plan plan, Gate gate, u64 *cycles, Done *done) {
  const u64 words = plan.puts * plan.len_bytes / 8;
  const bool both = plan.follows >= 2, sends = plan.follows != 1, receives = plan.follows != 0;
  u64 status = 0, wrong = 0;
  if (threadIdx.x == 0) {
    status = pass(gate, 1);
    begin(done);
  }
  const u64 count = together(status) ? 0 : plan.count;
  for (u64 n = 0; n < count; n++) {
    if (sends && plan.check) fill(self.source, words, n);
    __syncthreads();
    if (both) {
      // So that both begin at the same time: each tells the other that it is ready.
      if (threadIdx.x == 0) {
        status = code(self.channel.signal_peer().status);
        if (status == 0) status = code(self.channel.wait());
      }
      if (together(status)) break;
    }
    if (threadIdx.x == 0) {
      if (sends && n == plan.corrupt) self.source[0] ^= 1;
      const u64 start = clock64();
      if (sends) status = send_window(self, plan);
      cycles[2 * n] = clock64() - start;
      if (sends && status == 0) status = code(self.channel.flush());
      if (receives && status == 0) status = code(self.channel.wait());
      cycles[2 * n + 1] = clock64() - start;
    }
    if (together(status)) break;
    if (receives && plan.check && !is_whole(self.destination, words, n)) wrong++;
    if (threadIdx.x == 0) {
      // The receiver has looked: the next window may come.
      if (receives) status = code(self.channel.signal_peer().status);
      if (sends && status == 0) status = code(self.channel.wait());
    }
    if (together(status)) break;
  }
  if (threadIdx.x == 0) end(done, status, wrong);
}

// One way: messages into plan.puts places in turn, each checked on sight of its signal. The receiver signals back after each
// half of the places, which may then be used again. cycles[n] is from the begin to when an end is done with message n.
extern "C" __global__ void __launch_bounds__(1024) messages(End self, Plan plan, Gate gate, u64 *cycles, Done *done) {
  const u64 words = plan.len_bytes / 8, half = plan.puts / 2;
  u64 status = 0, wrong = 0, start = 0;
  if (threadIdx.x == 0) {
    status = pass(gate, 1);
    begin(done);
    start = clock64();
  }
  const u64 count = together(status) ? 0 : plan.count;
  for (u64 n = 0; n < count; n++) {
    const u64 place = n % plan.puts * words;
    if (plan.follows) {
      if (threadIdx.x == 0) status = code(self.channel.wait());
      if (together(status)) break;
      if (plan.check && !is_whole(self.destination + place, words, n)) wrong++;
      if (threadIdx.x == 0 && n % half == half - 1) status = code(self.channel.signal_peer().status);
    } else {
      if (threadIdx.x == 0 && n >= plan.puts && n % half == 0) status = code(self.channel.wait());
      if (together(status)) break;
      if (plan.check) fill(self.source + place, words, n);
      __syncthreads();
      if (threadIdx.x == 0) {
        if (n == plan.corrupt) self.source[place] ^= 1;
        status = code(self.channel.put_signal(place * 8, place * 8, plan.len_bytes).status);
      }
    }
    if (threadIdx.x == 0) cycles[n] = clock64() - start;
    if (together(status)) break;
  }
  if (threadIdx.x == 0) end(done, status, wrong);
}

struct Route {
  End end;
  u64 sends, receives; // the numbers of this way and of the way back
  u64 corrupt;         // the window in which a bit is flipped
  u64 unused;
};

static_assert(sizeof(Route) == 224, "as in ipc/pairs.rs");

// A block for each peer of a rank. All blocks of all ranks begin a window when the gate opens. cycles[n] is from then to the
// return of the flush.
extern "C" __global__ void __launch_bounds__(1024) pairs(const Route *routes, Plan plan, Gate gate, u64 *cycles, Done *done) {
  const Route self = routes[blockIdx.x];
  const u64 words = plan.puts * plan.len_bytes / 8;
  u64 status = 0, wrong = 0;
  gate.ready += 16 * blockIdx.x;
  cycles += plan.count * blockIdx.x;
  done += blockIdx.x;
  if (threadIdx.x == 0) begin(done);
  for (u64 n = 0; n < plan.count; n++) {
    if (plan.check) fill(self.end.source, words, n << 12 | self.sends);
    __syncthreads();
    if (threadIdx.x == 0) {
      if (n == self.corrupt) self.end.source[0] ^= 1;
      status = pass(gate, n + 1);
      const u64 start = clock64();
      if (status == 0) status = send_window(self.end, plan);
      if (status == 0) status = code(self.end.channel.flush());
      cycles[n] = clock64() - start;
      if (status == 0) status = code(self.end.channel.wait());
    }
    if (together(status)) break;
    if (plan.check && !is_whole(self.end.destination, words, n << 12 | self.receives)) wrong++;
  }
  if (threadIdx.x == 0) {
    end(done, status, wrong);
    // So that the others are started, and end by their own means.
    if (status) platform::store_release_system(gate.ready, ~0ull);
  }
}

// The floor: there and back by plain words in memory, without a FIFO. A thread of the host sees `trigger` and has the data
// copied and `flag` written.
extern "C" __global__ void __launch_bounds__(1024) floor_trips(u64 *trigger, u64 *flag, Plan plan, Gate gate,
                                                               u64 *cycles, Done *done) {
  if (threadIdx.x != 0) return;
  u64 status = pass(gate, 1);
  begin(done);
  for (u64 n = 0; n < plan.count && status == 0; n++) {
    const u64 entry = platform::clock_ns(), start = clock64();
    if (!plan.follows) platform::store_release_system(trigger, n + 1);
    while (status == 0 && platform::load_acquire_system(flag) < n + 1) {
      if (platform::clock_ns() - entry > 10000000000ull) status = code(Status::kTimeout);
    }
    cycles[n] = clock64() - start;
    if (plan.follows) platform::store_release_system(trigger, n + 1);
  }
  end(done, status, 0);
}
