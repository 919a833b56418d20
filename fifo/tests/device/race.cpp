// Producers whose payload lies outside the ring, in plain memory: only the ring orders its bytes. For ThreadSanitizer.
#include <memory>
#include <thread>
#include <vector>

#include "payload.h"

using namespace portway;

namespace {

constexpr u64 kBlocks = 4; // a producer writes a block again when the consumer has handed on its trigger
constexpr u64 kWords = 8;

struct Producer {
  u64 id;
  u64 blocks[kBlocks][kWords] = {};
  u64 positions[kBlocks] = {};
  u64 fault = 0; // the status that ended it

  // Writes block `n` and returns the trigger that points to it.
  bool fill(const FifoHandle &fifo, u64 n, Trigger *trigger) {
    const u64 index = n % kBlocks;
    if (n >= kBlocks) {
      const Status status = sync(fifo, positions[index]);
      if (status != Status::kOk) fault = static_cast<u64>(status);
    }
    for (u64 i = 0; i < kWords; i++) blocks[index][i] = payload::mix(id << 48 ^ n << 8 ^ i);
    *trigger = {{reinterpret_cast<u64>(blocks[index]), id << 48 | n}};
    return fault == 0;
  }

  bool note(Pushed pushed, u64 n) {
    if (pushed.status != Status::kOk) fault = static_cast<u64>(pushed.status);
    positions[n % kBlocks] = pushed.position;
    return fault == 0;
  }

  void scalar(const FifoHandle &fifo, u64 count) {
    Trigger trigger;
    for (u64 n = 0; n < count; n++) {
      if (!fill(fifo, n, &trigger) || !note(push(fifo, trigger), n)) return;
    }
  }

  void batches(const FifoHandle &fifo, u64 count) {
    Trigger triggers[2];
    for (u64 n = 0; n + 1 < count; n += 2) {
      if (!fill(fifo, n, &triggers[0]) || !fill(fifo, n + 1, &triggers[1])) return;
      const Pushed pushed = push_batch(fifo, triggers, 2);
      if (!note(pushed, n) || !note({pushed.status, pushed.position + 1}, n + 1)) return;
    }
  }
};

struct Crew {
  std::vector<std::unique_ptr<Producer>> producers;
  std::vector<std::thread> threads;
};

} // namespace

extern "C" {

// Starts `count` producers of `triggers` each, by `push` (form 0) or `push_batch` (1).
Crew *portway_race_start(const FifoHandle *fifo, u64 form, u64 count, u64 triggers) {
  auto crew = std::make_unique<Crew>();
  for (u64 id = 0; id < count; id++) {
    crew->producers.push_back(std::unique_ptr<Producer>(new Producer{id}));
    Producer *producer = crew->producers.back().get();
    crew->threads.emplace_back([=, fifo = *fifo] {
      if (form == 0) producer->scalar(fifo, triggers);
      if (form == 1) producer->batches(fifo, triggers);
    });
  }
  return crew.release();
}

// Waits for the producers, whose every call has a timeout. 0, or the status that ended one.
u64 portway_race_join(Crew *crew) {
  u64 fault = 0;
  for (auto &thread : crew->threads) thread.join();
  for (auto &producer : crew->producers) fault = producer->fault ? producer->fault : fault;
  delete crew;
  return fault;
}

} // extern "C"
