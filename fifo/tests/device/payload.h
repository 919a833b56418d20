// Payloads in which every one of the 126 bits depends on who pushed and on how many that thread had pushed before.
// The map is one to one: `device/ledger.rs` undoes it, so a single wrong bit names no producer or a wrong one.
#pragma once

#include "portway/fifo.cuh"

namespace payload {

using portway::u64;

constexpr u64 kBits = ~0ull >> 1;

inline u64 mix(u64 x) {
  x = (x ^ (x >> 29)) * 0xd6e8feb86659fd93ull;
  x = (x ^ (x >> 32)) * 0xa3b195354a39b70dull;
  return x ^ (x >> 30);
}

inline portway::Trigger encode(u64 salt, u64 producer, u64 n) {
  const u64 first = (producer ^ mix(n ^ salt)) & kBits;
  const u64 second = (n ^ mix(first + salt)) & kBits;
  return {{(first ^ mix(second)) & kBits, second}};
}

// What a producer adds up over its triggers, so that the positions it was told can be compared with the consumer's.
inline u64 digest(u64 position, u64 n) { return mix(position + mix(n)); }

} // namespace payload
