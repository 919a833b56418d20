// The kernels of the device tests, compiled at run time.
#include "portway/fifo.cuh"

using namespace portway;

// What a kernel counts.
struct Tally {
  u64 done;     // calls that succeeded
  u64 failed;   // calls that did not
  u64 statuses; // a bit for each status that a call has returned
  u64 misread;  // words that were not what they had to be
};

__device__ void count(Tally *tally, Status status) {
  atomicAdd(status == Status::kOk ? &tally->done : &tally->failed, 1ull);
  atomicOr(&tally->statuses, 1ull << static_cast<u32>(status));
}

__device__ u64 self() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }

// The payload of a trigger lies outside the ring: whoever sees the trigger must see it.
__device__ void put_payload(u64 *payload, u64 index) { payload[index] = index * 0x9e3779b97f4a7c15ull + 1; }

// Each thread pushes `n` triggers {thread, number}, then waits until its last one has been handed on.
extern "C" __global__ void push_scalar(FifoHandle fifo, u64 n, u64 *payload, Tally *tally) {
  Pushed last = {Status::kOk, 0};
  for (u64 i = 0; i < n && last.status == Status::kOk; i++) {
    put_payload(payload, self() * n + i);
    last = push(fifo, Trigger{{self(), i}});
    count(tally, last.status);
  }
  if (last.status == Status::kOk) count(tally, sync(fifo, last.position));
}

// The same by whole warps, whose lanes stay together.
extern "C" __global__ void push_warps(FifoHandle fifo, u64 n, u64 *payload, Tally *tally) {
  Pushed last = {Status::kOk, 0};
  for (u64 i = 0; i < n; i++) {
    put_payload(payload, self() * n + i);
    __syncwarp();
    last = push(fifo, Trigger{{self(), i}});
    count(tally, last.status);
    if (__any_sync(__activemask(), last.status != Status::kOk)) return;
  }
  count(tally, sync(fifo, last.position));
}

extern "C" __global__ void push_batches(FifoHandle fifo, u64 n, u64 *payload, Tally *tally) {
  constexpr u64 kBatch = 4;
  Pushed last = {Status::kOk, 0};
  for (u64 i = 0; i < n && last.status == Status::kOk; i += kBatch) {
    Trigger batch[kBatch];
    const u64 len = n - i < kBatch ? n - i : kBatch;
    for (u64 j = 0; j < len; j++) {
      put_payload(payload, self() * n + i + j);
      batch[j] = Trigger{{self(), i + j}};
    }
    last = push_batch(fifo, batch, len);
    for (u64 j = 0; j < len; j++) count(tally, last.status);
    last.position += len - 1;
  }
  if (last.status == Status::kOk) count(tally, sync(fifo, last.position));
}

// The lanes of a warp part, push in different ways, and meet again, each time in other groups.
extern "C" __global__ void push_divergent(FifoHandle fifo, u64 n, u64 *payload, Tally *tally) {
  Pushed last = {Status::kOk, 0};
  for (u64 i = 0; i < n && last.status == Status::kOk; i++) {
    put_payload(payload, self() * n + i);
    const Trigger trigger = {{self(), i}};
    switch ((threadIdx.x + i) % 5) {
      case 0: last = push(fifo, trigger); break;
      case 1: last = push_batch(fifo, &trigger, 1); break;
      case 2:
        if (threadIdx.x & 8) __nanosleep(500);
        last = push(fifo, trigger);
        break;
      case 3:
        last = push(fifo, trigger);
        if (last.status == Status::kOk) last.status = sync(fifo, last.position);
        break;
      default: last = push(fifo, trigger); break;
    }
    count(tally, last.status);
  }
  if (last.status == Status::kOk) count(tally, sync(fifo, last.position));
}

// Each thread pushes `n` triggers into a FIFO of its own, and says so when it is out of the last call.
extern "C" __global__ void push_apart(const FifoHandle *fifos, u64 n, u64 *left, Tally *tally) {
  const FifoHandle fifo = fifos[self()];
  for (u64 i = 0; i < n; i++) count(tally, push(fifo, Trigger{{self(), i}}).status);
  platform::store_release_system(left + self(), 1);
}

// Pushes until a push fails, at most `n` times.
extern "C" __global__ void push_until_it_fails(FifoHandle fifo, u64 n, Tally *tally) {
  for (u64 i = 0; i < n; i++) {
    const Status status = push(fifo, Trigger{{self(), i}}).status;
    count(tally, status);
    if (status != Status::kOk) return;
  }
}

// Says that it runs, and stays until `*go` has reached `value` or the time is over.
extern "C" __global__ void stay(u64 *running, const u64 *go, u64 value, u64 timeout_ns, Tally *tally) {
  platform::store_release_system(running, 1);
  const u64 start = platform::clock_ns();
  bool reached = false;
  while (!reached && platform::clock_ns() - start < timeout_ns) {
    reached = portway::reached(platform::load_acquire_system(go), value);
  }
  count(tally, reached ? Status::kOk : Status::kTimeout);
}

// Checks that words hold `start`, `start` + 1 and so on, and adds `add` to each.
extern "C" __global__ void check_and_add(u64 *words, u64 n, u64 start, u64 add, Tally *tally) {
  for (u64 i = self(); i < n; i += static_cast<u64>(gridDim.x) * blockDim.x) {
    if (words[i] != start + i) atomicAdd(&tally->misread, 1ull);
    words[i] += add;
  }
}
