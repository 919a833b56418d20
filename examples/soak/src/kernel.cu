// What a block is to do, compiled at run time behind the text of portway/port_channel.cuh.

using namespace portway;

enum : u64 { kReceive, kSend, kOnce };

// `gpu.rs` writes them.
struct Role {
  PortChannel channel;
  const u64 *text; // the calls; for one that receives, how many signals
  u64 len;
  u64 kind;
  u64 *result; // 1 + the status, and how many calls succeeded
};
static_assert(sizeof(Role) == sizeof(PortChannel) + 4 * 8, "ROLE_BYTES of gpu.rs");

__device__ Status carry_out(const PortChannel &channel, u64 call, u64 at) {
  if (call == 0) return channel.flush();
  if (call == 1) return channel.signal_peer().status;
  const u64 len_bytes = call >> 2;
  return call & 1 ? channel.put_signal(at, at, len_bytes).status : channel.put(at, at, len_bytes).status;
}

extern "C" __global__ void call(const Role *roles, u64 place_bytes) {
  const Role &role = roles[blockIdx.x];
  const PortChannel channel = role.channel;
  Status status = Status::kOk;
  u64 done = 0;
  if (role.kind == kReceive) {
    for (const u64 signals = role.text[0]; status == Status::kOk && done < signals; done++) status = channel.wait();
    if (status == Status::kOk) status = channel.signal_peer().status;
    if (status == Status::kOk) status = channel.flush();
  } else {
    for (; status == Status::kOk && done < role.len; done++) {
      status = carry_out(channel, role.text[done], done * place_bytes);
    }
    if (status == Status::kOk) status = channel.flush();
    if (status == Status::kOk && role.kind == kSend) status = channel.wait(); // the receiver has them all
  }
  role.result[1] = done;
  platform::store_release_system(role.result, 1 + static_cast<u64>(status));
}
