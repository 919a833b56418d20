// A kernel for each call of fifo.cuh, compiled by ci/device-header.sh. The lines below say what the script finds in the
// PTX of a kernel or a function, and how a weakened header, made with sed, must fail there.
//
//! ptx push_kernel has st\.release\.sys\.global\.v2
//! ptx push_kernel lacks st\.relaxed\.sys
//! ptx push_kernel lacks (bar\.warp|shfl|vote)\.sync
//! plant push_kernel s/st\.release\.sys\.global\.v2/st.relaxed.sys.global.v2/
//! ptx push_late has st\.release\.sys\.global\.v2
//! ptx push_late lacks st\.relaxed\.sys
//! ptx push_late lacks (bar\.warp|shfl|vote)\.sync
//! plant push_late s/st\.release\.sys\.global\.v2/st.relaxed.sys.global.v2/
//! plant push_late s/pause\.wait(elected);/pause.wait(elected); __syncwarp();/
//! ptx push_batch_kernel has fence\.acq_rel\.sys.*st\.relaxed\.sys\.global\.v2
//! ptx push_batch_kernel lacks st\.relaxed\.sys\.global\.v2.*fence\.acq_rel\.sys
//! plant push_batch_kernel s/fence\.acq_rel\.sys;//
//! plant push_batch_kernel s/^  platform::slots_fence();//
//! ptx push_batch_late has fence\.acq_rel\.sys.*st\.relaxed\.sys\.global\.v2
//! plant push_batch_late s/^  platform::slots_fence();//
//! ptx wait has ld\.acquire\.gpu\.global\.v2.*ld\.acquire\.sys
//! ptx wait has atom\.cas\.relaxed\.gpu.*ld\.relaxed\.sys.*ld\.acquire\.sys.*st\.release\.gpu.*st\.relaxed\.gpu
//! ptx wait has atom\.cas\.acq_rel\.gpu
//! ptx wait lacks (ld|st|cas)\.(weak|volatile)
//! plant wait s/ld\.acquire\.gpu\.global\.v2/ld.relaxed.gpu.global.v2/
//! plant wait s/atom\.cas\.acq_rel/atom.cas.relaxed/
//! plant wait s/st\.release\.gpu/st.relaxed.gpu/
//! plant wait s/ld\.acquire\.sys/ld.relaxed.sys/
#include "portway/fifo.cuh"

using portway::FifoHandle;
using portway::Pushed;
using portway::Trigger;
using portway::u64;

extern "C" __global__ void push_kernel(FifoHandle fifo, Trigger trigger, Pushed *pushed) {
  *pushed = portway::push(fifo, trigger);
}

extern "C" __global__ void push_batch_kernel(FifoHandle fifo, const Trigger *triggers, u64 n, Pushed *pushed) {
  *pushed = portway::push_batch(fifo, triggers, n);
}

extern "C" __global__ void sync_kernel(FifoHandle fifo, u64 position, portway::Status *status) {
  *status = portway::sync(fifo, position);
}

// A wait on a word of the caller's, with no replica.
extern "C" __global__ void wait_kernel(portway::WatchHandle watch, u64 target, u64 timeout_ns, portway::Status *status) {
  *status = portway::wait(watch, nullptr, target, timeout_ns).status;
}
