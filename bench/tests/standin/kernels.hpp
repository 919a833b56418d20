// What the bench's kernels need of CUDA when a C++ compiler compiles them: goes before their text. A block has one thread
// here, whatever a launch says, so barriers are nothing.
#include <chrono>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __launch_bounds__(threads)

struct Dimension {
  unsigned x;
};
static thread_local Dimension threadIdx{0}, blockIdx{0}, blockDim{1}, gridDim{1};

static inline void __syncthreads() {}
static inline void __syncwarp() {}
static inline int __syncthreads_or(int predicate) { return predicate; }
static inline int __any_sync(unsigned, int predicate) { return predicate; }
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long n) {
  return __atomic_fetch_add(p, n, __ATOMIC_RELAXED);
}
// A cycle is a nanosecond.
static inline long long clock64() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace standin {

using Turn = void (*)(void *);

// Runs a kernel by a thread a block, when it is its turn.
template <class... Parameters, std::size_t... I>
void launch(void (*kernel)(Parameters...), void **parameters, unsigned blocks, Turn before, Turn after, void *turn,
            std::index_sequence<I...>) {
  const auto arguments = std::tuple<Parameters...>(*static_cast<Parameters *>(parameters[I])...);
  std::thread([=] {
    before(turn);
    std::vector<std::thread> threads;
    for (unsigned block = 0; block < blocks; block++) {
      threads.emplace_back([=] {
        blockIdx.x = block;
        gridDim.x = blocks;
        std::apply(kernel, arguments);
      });
    }
    for (std::thread &thread : threads) thread.join();
    after(turn);
  }).detach();
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), void **parameters, unsigned blocks, Turn before, Turn after, void *turn) {
  launch(kernel, parameters, blocks, before, after, turn, std::index_sequence_for<Parameters...>());
}

} // namespace standin
