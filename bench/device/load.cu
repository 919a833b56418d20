// What kernels that push at a pace share, before the text of the layer's own. Every loop ends: by a count, by a time, or by
// the timeout of the call in it.
#include "portway/fifo.cuh"

using namespace portway;

__device__ u64 self() { return static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; }

// What a thread has sent.
struct Sent {
  u64 count;
  u64 sum; // of the weights of its triggers, before one was corrupted
  u64 start_ns, end_ns;
  u64 status; // of the call that ended it, 0 if none failed
};

__device__ u32 saturated(u64 value) { return value < ~0u ? static_cast<u32>(value) : ~0u; }

// When all threads of the next kernel begin.
extern "C" __global__ void set_start(u64 *start_ns) { *start_ns = platform::clock_ns() + 1000000; }

// The operations of all threads are due one every `period_ps`, `each` of a thread.
struct Offer {
  const u64 *start_ns;
  u64 period_ps, each, limit_ns;
  u32 *samples_ns;
  Sent *sent;
};

static_assert(sizeof(Sent) == 40 && sizeof(Offer) == 48, "as in load/kernel.rs");

// Offers a load. Each operation is timed from when it is due, not from when its thread gets to it, to its end; so a thread
// that lags shows. Gives up at twice the time. `ops.prepare(n)` and `ops.verify(n)` are not in the time of the n-th.
template <class Ops> __device__ void offer_load(const Offer &offer, Ops &ops) {
  const u64 start = *offer.start_ns, threads = static_cast<u64>(gridDim.x) * blockDim.x;
  Sent mine = {0, 0, start, 0, 0};
  while (mine.count < offer.each && mine.status == 0 && platform::clock_ns() < start + 2 * offer.limit_ns) {
    const u64 n = mine.count++, due = start + (n * threads + self()) * offer.period_ps / 1000;
    ops.prepare(n, mine);
    while (platform::clock_ns() < due) {
    }
    mine.status = static_cast<u64>(ops.carry_out(n));
    offer.samples_ns[self() * offer.each + n] = saturated(platform::clock_ns() - due);
    ops.verify(n);
  }
  mine.end_ns = platform::clock_ns();
  offer.sent[self()] = mine;
}
