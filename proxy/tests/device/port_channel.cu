// A kernel for each call of port_channel.cuh, compiled by ci/device-header.sh. fifo/tests/device/fifo.cu says what the
// lines below mean.
//
//! ptx put_kernel lacks st\.(relaxed|weak)\.sys
//! ptx wait_signal_kernel has ld\.acquire\.gpu.*atom\.cas\.acq_rel\.gpu
//! ptx wait_signal_kernel lacks (ld|st|cas)\.(weak|volatile)
//! plant wait_signal_kernel s/ld\.acquire\.gpu/ld.relaxed.gpu/
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

extern "C" __global__ void flush_kernel(PortChannel channel, Status *status) { *status = channel.flush(); }

extern "C" __global__ void put_signal_flush_kernel(PortChannel channel, u64 len_bytes, Status *status) {
  *status = channel.put_signal_flush(0, 0, len_bytes);
}

extern "C" __global__ void wait_signal_kernel(PortChannel channel, Status *status) { *status = channel.wait(); }

extern "C" __global__ void poll_kernel(PortChannel channel, Status *status, u64 *error) {
  *status = channel.poll();
  *error = channel.error();
}
