// The kernels of the device tests, compiled at run time behind the text of portway/port_channel.cuh.

using namespace portway;
using Byte = unsigned char;

// What a kernel counts.
struct Tally {
  u64 done;     // calls that succeeded
  u64 failed;   // calls that did not
  u64 statuses; // a bit for each status that a call has returned
  u64 misread;  // bytes that were not what they had to be
};

__device__ bool count(Tally *tally, Status status) {
  atomicAdd(status == Status::kOk ? &tally->done : &tally->failed, 1ull);
  atomicOr(&tally->statuses, 1ull << static_cast<u32>(status));
  return status == Status::kOk;
}

__device__ Byte pattern(u64 i, u64 round) { return static_cast<Byte>(i * 31 + (i >> 8) + round * 7 + 1); }

// ---- put, signal, flush, wait, poll ----

// One round of the side that puts, by one thread: each way of saying the same in turn.
__device__ bool put_round(const PortChannel &a, u64 source, u64 destination, u64 len_bytes, u64 round, Tally *tally) {
  const u64 half = len_bytes / 2;
  switch (round % 4) {
    case 0: return count(tally, a.put_signal(source, destination, len_bytes).status);
    case 1:
      return count(tally, a.put(source, destination, len_bytes).status) && count(tally, a.signal_peer().status);
    case 2: return count(tally, a.put_signal_flush(source, destination, len_bytes));
    default:
      if (half && !count(tally, a.put(source, destination, half).status)) return false;
      return count(tally, a.put_signal(source + half, destination + half, len_bytes - half).status) &&
             count(tally, a.flush());
  }
}

// Waits for a signal, every other time by polling.
__device__ bool wait_round(const PortChannel &b, u64 round, Tally *tally) {
  if (round % 2 == 0) return count(tally, b.wait());
  const u64 start = platform::clock_ns();
  Status status = b.poll();
  while (status == Status::kTimeout && platform::clock_ns() - start < b.fifo.timeout_ns) status = b.poll();
  return count(tally, status);
}

// Block 0 fills its source and puts it; block 1 waits, looks at every byte, and signals back.
extern "C" __global__ void exchange(PortChannel a, PortChannel b, Byte *source, const Byte *destination, u64 source_at,
                                    u64 destination_at, u64 len_bytes, u64 rounds, Tally *tally) {
  __shared__ bool goes_on;
  for (u64 round = 0; round < rounds; round++) {
    if (blockIdx.x == 0) {
      for (u64 i = threadIdx.x; i < len_bytes; i += blockDim.x) source[source_at + i] = pattern(i, round);
      __syncthreads();
      if (threadIdx.x == 0) {
        goes_on = put_round(a, source_at, destination_at, len_bytes, round, tally) && count(tally, a.wait());
      }
      __syncthreads();
    } else {
      __syncthreads(); // everybody has looked at `goes_on`
      if (threadIdx.x == 0) goes_on = wait_round(b, round, tally);
      __syncthreads();
      u64 misread = 0;
      for (u64 i = threadIdx.x; goes_on && i < len_bytes; i += blockDim.x) {
        misread += destination[destination_at + i] != pattern(i, round);
      }
      if (misread) atomicAdd(&tally->misread, misread);
      __syncthreads();
      if (threadIdx.x == 0 && goes_on) goes_on = count(tally, b.signal_peer().status);
      __syncthreads();
    }
    if (!goes_on) return;
  }
}

// ---- many threads that wait ----

// Each thread pushes until a push fails. `entered` counts the calls that were begun.
extern "C" __global__ void wait_in_push(FifoHandle fifo, u64 *entered, Tally *tally) {
  Status status = Status::kOk;
  while (status == Status::kOk) {
    atomicAdd(entered, 1ull);
    status = push(fifo, Trigger{{threadIdx.x, blockIdx.x}}).status;
    count(tally, status);
  }
}

extern "C" __global__ void wait_in_sync(FifoHandle fifo, u64 position, u64 *entered, Tally *tally) {
  atomicAdd(entered, 1ull);
  count(tally, sync(fifo, position));
}

extern "C" __global__ void wait_in_wait(PortChannel channel, u64 *entered, Tally *tally) {
  atomicAdd(entered, 1ull);
  count(tally, channel.wait());
}

extern "C" __global__ void wait_in_flush(PortChannel channel, u64 *entered, Tally *tally) {
  atomicAdd(entered, 1ull);
  count(tally, channel.flush());
}

extern "C" __global__ void push_and_sync(FifoHandle fifo, Tally *tally) {
  const Pushed pushed = push(fifo, Trigger{{1, 2}});
  if (count(tally, pushed.status)) count(tally, sync(fifo, pushed.position));
}

extern "C" __global__ void put_signal_flush(PortChannel channel, u64 len_bytes, Tally *tally) {
  count(tally, channel.put_signal_flush(0, 0, len_bytes));
}

// ---- a kernel that needs the proxy while it runs ----

extern "C" __global__ void nothing() {}

// Words in pinned memory between `needs_proxy` and the host: what each tells the other.
enum : u64 { kRunning, kGo, kLeave, kRounds, kStage, kStatus, kMisread, kFinished };

// What it was about when it stopped.
enum : u64 { kAtGo, kAtPut, kAtCopied, kAtWait, kAtFlush, kAtReplica, kAtLeave, kAtEnd };

__device__ bool wait_for(const u64 *word, u64 value, u64 timeout_ns) {
  const u64 start = platform::clock_ns();
  while (!reached(platform::load_acquire_system(word), value)) {
    if (platform::clock_ns() - start >= timeout_ns) return false;
  }
  return true;
}

// By one thread: says that it runs, waits for the host's go, then puts a word from `a` to `b`, waits for its signal,
// looks at it and flushes, `rounds` times. If there is a `copied`, it waits each time until that has reached the
// trigger's position + 1, as a kernel does that watches a copy of the tail. In the end, if there is a `replica`, until
// that has reached the last position + 1, and if it is to `linger`, for the host.
extern "C" __global__ void needs_proxy(PortChannel a, PortChannel b, u64 *source, const u64 *destination,
                                       const u64 *copied, const u64 *replica, u64 rounds, u64 linger, u64 gate_ns,
                                       u64 *report) {
  const u64 limit_ns = a.fifo.timeout_ns;
  u64 stage = kAtGo, last = 0, round = 0, misread = 0;
  platform::store_release_system(report + kRunning, 1);
  Status status = wait_for(report + kGo, 1, gate_ns) ? Status::kOk : Status::kTimeout;
  for (; round < rounds && status == Status::kOk; round++) {
    const u64 value = round * 0x9e3779b97f4a7c15ull + 1;
    *source = value;
    stage = kAtPut;
    const Pushed pushed = a.put_signal(0, 0, 8);
    if ((status = pushed.status) != Status::kOk) break;
    last = pushed.position + 1;
    stage = kAtCopied;
    if (copied && !wait_for(copied, last, limit_ns)) status = Status::kTimeout;
    if (status != Status::kOk) break;
    stage = kAtWait;
    if ((status = b.wait()) != Status::kOk) break;
    misread += platform::load_acquire_system(destination) != value;
    stage = kAtFlush;
    if ((status = a.flush()) != Status::kOk) break;
    last++;
  }
  if (status == Status::kOk && replica) {
    stage = kAtReplica;
    if (!wait_for(replica, last, limit_ns)) status = Status::kTimeout;
  }
  if (status == Status::kOk && linger) {
    stage = kAtLeave;
    platform::store_release_system(report + kRounds, round);
    if (!wait_for(report + kLeave, 1, gate_ns)) status = Status::kTimeout;
  }
  report[kRounds] = round;
  report[kStage] = status == Status::kOk ? static_cast<u64>(kAtEnd) : stage;
  report[kStatus] = static_cast<u64>(status);
  report[kMisread] = misread;
  platform::store_release_system(report + kFinished, 1);
}

// By one thread: says that it runs and stays until `*word` has reached `value` or the time is over.
extern "C" __global__ void stay(const u64 *word, u64 value, u64 timeout_ns, u64 *report) {
  platform::store_release_system(report + kRunning, 1);
  const bool came = wait_for(word, value, timeout_ns);
  report[kStatus] = static_cast<u64>(came ? Status::kOk : Status::kTimeout);
  platform::store_release_system(report + kFinished, 1);
}
