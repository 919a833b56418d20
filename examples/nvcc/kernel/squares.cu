// Each thread hands its number and the square of it to the host, and waits until the host has taken them.
#include "portway/fifo.cuh"

extern "C" __global__ void squares(portway::FifoHandle fifo, portway::u64 *failed) {
  const portway::u64 n = blockIdx.x * blockDim.x + threadIdx.x;
  const portway::Pushed pushed = portway::push(fifo, {{n, n * n}});
  portway::Status status = pushed.status;
  if (status == portway::Status::kOk) status = portway::sync(fifo, pushed.position);
  if (status != portway::Status::kOk) *failed = 1 + static_cast<portway::u64>(status);
}
