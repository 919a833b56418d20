// A kernel for each call of port_channel.cuh, compiled by ci/device-header.sh; see fifo/tests/device/fifo.cu.
//
//! ptx put_kernel has st\.release\.sys\.global\.v2
//! ptx put_kernel lacks st\.relaxed\.sys
//! plant put_kernel s/st\.release\.sys\.global\.v2/st.relaxed.sys.global.v2/
//! ptx wait_kernel has ld\.acquire\.gpu.*ld\.acquire\.sys.*atom\.cas\.acq_rel\.gpu
//! ptx wait_kernel lacks (ld|st|cas)\.(relaxed|weak|volatile)
//! plant wait_kernel s/ld\.acquire\.gpu/ld.relaxed.gpu/
#include "portway/port_channel.cuh"

using portway::PortChannel;
using portway::Pushed;
using portway::Status;
using portway::u64;

extern "C" __global__ void put_kernel(PortChannel channel, u64 source, u64 destination, u64 len_bytes, Pushed *pushed) {
  pushed[0] = channel.put(source, destination, len_bytes);
  pushed[1] = channel.put_signal(source, destination, len_bytes);
  pushed[2] = channel.signal_peer();
}

extern "C" __global__ void flush_kernel(PortChannel channel, u64 source, u64 destination, u64 len_bytes,
                                        Status *status) {
  status[0] = channel.put_signal_flush(source, destination, len_bytes);
  status[1] = channel.flush();
}

extern "C" __global__ void wait_kernel(PortChannel channel, Status *status) {
  status[0] = channel.wait();
  status[1] = channel.poll();
}

extern "C" __global__ void error_kernel(PortChannel channel, u64 *error) { *error = channel.error(); }
