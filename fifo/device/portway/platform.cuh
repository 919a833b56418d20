// What the compilers differ in: atomics, the clock, how to wait.
//
// Compiled by nvcc and NVRTC, the functions below are PTX instructions. Compiled by a host C++17 compiler, they are the
// compiler's atomics, and threads play the GPU: the protocol above them is the very same source, so a machine without
// a GPU tests it. Nothing here knows the protocol.
//
// `system` scope orders with the processor and other devices, `device` scope with the threads of this GPU.
#ifndef PORTWAY_PLATFORM_CUH
#define PORTWAY_PLATFORM_CUH

#if defined(__CUDACC__)
#define PORTWAY_FN __device__ __forceinline__
// For functions that wait. Apart, they keep what is inlined short: a push that finds room is some thirty instructions.
#define PORTWAY_WAIT_FN inline __device__ __noinline__
#else
#define PORTWAY_FN inline
#define PORTWAY_WAIT_FN inline
#include <chrono>
#include <thread>
#endif

namespace portway {

using u64 = unsigned long long;
using u32 = unsigned int;
static_assert(sizeof(u64) == 8 && sizeof(void *) == 8, "portway needs a 64-bit target");

struct Pair {
  u64 first, second;
};

namespace platform {

#if defined(__CUDACC__)

PORTWAY_FN size_t global(const void *p) { return __cvta_generic_to_global(p); }

PORTWAY_FN u64 load_acquire_system(const u64 *p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(global(p)) : "memory");
  return v;
}

// Ordered by nothing but what the value decides.
PORTWAY_FN u64 load_relaxed_system(const u64 *p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(global(p)) : "memory");
  return v;
}

PORTWAY_FN u64 load_acquire_device(const u64 *p) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(global(p)) : "memory");
  return v;
}

// Two neighbouring words in one access. Not atomic as a pair.
PORTWAY_FN Pair load_pair_acquire_device(const u64 *p) {
  Pair v;
  asm volatile("ld.acquire.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(global(p))
               : "memory");
  return v;
}

PORTWAY_FN Pair load_pair_relaxed_device(const u64 *p) {
  Pair v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.first), "=l"(v.second)
               : "l"(global(p))
               : "memory");
  return v;
}

PORTWAY_FN void store_relaxed_device(u64 *p, u64 v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(global(p)), "l"(v) : "memory");
}

PORTWAY_FN void store_release_system(u64 *p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(global(p)), "l"(v) : "memory");
}

PORTWAY_FN void store_release_device(u64 *p, u64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(global(p)), "l"(v) : "memory");
}

// Both words of a slot, each with release at system scope.
PORTWAY_FN void store_slot(u64 *slot, u64 first, u64 second) {
  asm volatile("st.release.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(global(slot)), "l"(first), "l"(second)
               : "memory");
}

// For several slots by one thread: one fence, then stores that it covers.
PORTWAY_FN void slots_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

PORTWAY_FN void store_slot_after_fence(u64 *slot, u64 first, u64 second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(global(slot)), "l"(first), "l"(second)
               : "memory");
}

PORTWAY_FN u64 fetch_add_relaxed_device(u64 *p, u64 n) {
  u64 v;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(v) : "l"(global(p)), "l"(n) : "memory");
  return v;
}

// Returns what was there; it was replaced if that equals `expected`.
PORTWAY_FN u64 compare_exchange_device(u64 *p, u64 expected, u64 desired) {
  u64 v;
  asm volatile("atom.cas.acq_rel.gpu.global.b64 %0, [%1], %2, %3;"
               : "=l"(v)
               : "l"(global(p)), "l"(expected), "l"(desired)
               : "memory");
  return v;
}

// Makes a 0 a 1; false if it was none. An election, not a lock: it orders nothing.
PORTWAY_FN bool elect_device(u64 *p) {
  u64 v;
  asm volatile("atom.cas.relaxed.gpu.global.b64 %0, [%1], 0, 1;" : "=l"(v) : "l"(global(p)) : "memory");
  return v == 0;
}

// How often the elected reader looks before it gives others the chance. More than a few, since an election has its cost;
// not many, since the lanes of its warp may stand still until it comes out.
constexpr u32 kReaderLooks = 64;

// The GPU's global timer, in nanoseconds.
PORTWAY_FN u64 clock_ns() {
  u64 v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
  return v;
}

// Lets the other lanes of the warp run. Lanes that have parted run in turns, and one that never sleeps can keep the
// others, and what it waits for, from running at all.
PORTWAY_FN void yield() { __nanosleep(20); }

// Paces a waiting thread. The elected reader's loads over the bus are nearly pace enough.
struct Pause {
  PORTWAY_FN void wait(bool elected) { __nanosleep(elected ? 20 : 100); }
};

// True for the first of the lanes of a warp that run this together with the same `word`. It orders nothing, and which lanes
// run together is the scheduler's choice. No lane waits in it: those that it names are the ones that are here.
PORTWAY_FN bool speaks(const u64 *word) {
  u32 same, below;
  asm volatile("match.any.sync.b64 %0, %1, %2;" : "=r"(same) : "l"(word), "r"(__activemask()));
  asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  return (same & below) == 0;
}

#else // a host compiler: threads play the GPU

PORTWAY_FN u64 load_acquire_system(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
PORTWAY_FN u64 load_relaxed_system(const u64 *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
PORTWAY_FN u64 load_acquire_device(const u64 *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
PORTWAY_FN Pair load_pair_acquire_device(const u64 *p) {
  Pair v;
  v.first = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  v.second = __atomic_load_n(p + 1, __ATOMIC_ACQUIRE);
  return v;
}
PORTWAY_FN Pair load_pair_relaxed_device(const u64 *p) {
  Pair v;
  v.first = __atomic_load_n(p, __ATOMIC_RELAXED);
  v.second = __atomic_load_n(p + 1, __ATOMIC_RELAXED);
  return v;
}
PORTWAY_FN void store_relaxed_device(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
PORTWAY_FN void store_release_system(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
PORTWAY_FN void store_release_device(u64 *p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }

#if defined(PORTWAY_PLANT_RELAXED_SLOT) // a control: the ThreadSanitizer test must notice
constexpr int kSlotOrder = __ATOMIC_RELAXED;
#else
constexpr int kSlotOrder = __ATOMIC_RELEASE;
#endif

PORTWAY_FN void store_slot(u64 *slot, u64 first, u64 second) {
  __atomic_store_n(slot, first, kSlotOrder);
  __atomic_store_n(slot + 1, second, kSlotOrder);
}
// ThreadSanitizer does not follow fences, so each store is a release instead.
PORTWAY_FN void slots_fence() {}
PORTWAY_FN void store_slot_after_fence(u64 *slot, u64 first, u64 second) { store_slot(slot, first, second); }
PORTWAY_FN u64 fetch_add_relaxed_device(u64 *p, u64 n) { return __atomic_fetch_add(p, n, __ATOMIC_RELAXED); }
PORTWAY_FN u64 compare_exchange_device(u64 *p, u64 expected, u64 desired) {
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
PORTWAY_FN bool elect_device(u64 *p) {
  u64 none = 0;
  return __atomic_compare_exchange_n(p, &none, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
constexpr u32 kReaderLooks = 1; // threads that share processors are better off when the one that runs may read
PORTWAY_FN u64 clock_ns() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<u64>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

// Spins, yields a little, then sleeps, the longer the longer it has waited. So a thousand waiting threads leave the
// processor to those that can go on. To yield for longer would be dear: on a busy machine each time costs a turn.
struct Pause {
  u32 rounds = 0, sleep_us = 50;
  void wait(bool) {
    if (rounds < 20) {
      if (++rounds > 16) std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(sleep_us));
      if (sleep_us < 1600) sleep_us += sleep_us / 4;
    }
  }
};

PORTWAY_FN void yield() {}
PORTWAY_FN bool speaks(const u64 *) { return true; } // threads do not run in step

#endif

} // namespace platform
} // namespace portway

#endif // PORTWAY_PLATFORM_CUH
