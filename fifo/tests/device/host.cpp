// Threads that play a GPU: they run the device header, compiled for the processor, against the Rust consumer.
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "payload.h"

using namespace portway;

namespace {

enum Form : u64 { kScalar, kBatch };

struct Plan {
  u64 form;
  u64 producers;
  u64 calls;       // of each producer
  u64 batch_max;   // batches have 1 to this many triggers
  u64 salt;
};

// What one producer has to say when it is done.
struct Report {
  u64 pushed;   // triggers
  u64 digest;   // over position and number of each trigger
  u64 fault;    // 0, or the line below that saw something wrong
  u64 status;   // what it saw
  u64 position;
};

struct Producer {
  const FifoHandle fifo;
  const Plan plan;
  const u64 id;
  Report report = {};
  u64 last = 0; // the position of the newest trigger

  bool fail(u64 line, Status status, u64 position) {
    if (report.fault == 0) {
      report.fault = line;
      report.status = static_cast<u64>(status);
      report.position = position;
    }
    return false;
  }

  // Notes `n` triggers at consecutive positions.
  bool note(Pushed pushed, u64 n, u64 line) {
    if (pushed.status != Status::kOk) return fail(line, pushed.status, pushed.position);
    if (report.pushed > 0 && !reached(pushed.position, last + 1)) return fail(line, pushed.status, pushed.position);
    for (u64 i = 0; i < n; i++) report.digest += payload::digest(pushed.position + i, report.pushed++);
    last = pushed.position + n - 1;
    return true;
  }

  void scalar() {
    for (u64 call = 0; call < plan.calls; call++) {
      if (!note(push(fifo, payload::encode(plan.salt, id, report.pushed)), 1, __LINE__)) return;
    }
  }

  void batches() {
    std::vector<Trigger> triggers(plan.batch_max);
    for (u64 call = 0; call < plan.calls; call++) {
      const u64 n = 1 + payload::mix(plan.salt ^ id << 32 ^ call) % plan.batch_max;
      for (u64 i = 0; i < n; i++) triggers[i] = payload::encode(plan.salt, id, report.pushed + i);
      if (!note(push_batch(fifo, triggers.data(), n), n, __LINE__)) return;
    }
  }

  void finish(std::atomic<u64> &done) {
    if (report.fault == 0 && report.pushed > 0) {
      const Status status = sync(fifo, last);
      if (status != Status::kOk) fail(__LINE__, status, last);
    }
    done.fetch_add(1);
  }
};

// Holds threads back until all of them are there: those that wait in a call leave little time to make the others.
class Gate {
 public:
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool opened = changed_.wait_for(lock, std::chrono::seconds(60), [&] { return open_; });
    if (opened) return;
    std::fprintf(stderr, "host.cpp: not all threads were there in 60 s\n");
    std::abort();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

struct Crew {
  Gate gate;
  std::atomic<u64> done{0};
  std::vector<std::unique_ptr<Producer>> producers;
  std::vector<std::thread> threads;
};

struct Waiter {
  u64 status, position, returned_ns;
};

struct Waiters {
  Gate gate;
  std::atomic<u64> entered{0};
  std::vector<Waiter> reports;
  std::vector<std::thread> threads;
};

} // namespace

extern "C" {

struct Outcome {
  u64 status, position;
};

struct Fact {
  const char *name;
  u64 value;
};

// How this compiler lays out what the host and the device share. Ends with a null name.
const Fact *portway_test_facts() {
#define OFFSET(type, field) {#type "." #field, offsetof(type, field)}
  static const Fact facts[] = {
      {"sizeof FifoHandle", sizeof(FifoHandle)},
      {"alignof FifoHandle", alignof(FifoHandle)},
      {"sizeof WatchHandle", sizeof(WatchHandle)},
      {"alignof WatchHandle", alignof(WatchHandle)},
      {"sizeof Trigger", sizeof(Trigger)},
      OFFSET(FifoHandle, version),
      OFFSET(FifoHandle, shift),
      OFFSET(FifoHandle, slots),
      OFFSET(FifoHandle, head),
      OFFSET(FifoHandle, tail),
      OFFSET(FifoHandle, flushed),
      OFFSET(FifoHandle, broken),
      OFFSET(FifoHandle, timeout_ns),
      OFFSET(WatchHandle, value),
      OFFSET(WatchHandle, stop),
      OFFSET(WatchHandle, seen),
      OFFSET(WatchHandle, reader),
#define STATUS(name) {#name, static_cast<u64>(Status::name)}
      STATUS(kOk),
      STATUS(kTimeout),
      STATUS(kAborted),
      STATUS(kBrokenByTimeout),
      STATUS(kBrokenByAbort),
      STATUS(kInvalid),
#undef STATUS
      {"kHandleVersion", kHandleVersion},
      {"kMaxTimeoutNs", kMaxTimeoutNs},
      {"kParity", kParity},
      {nullptr, 0},
  };
#undef OFFSET
  return facts;
}

u64 portway_test_now_ns() { return platform::clock_ns(); }

Outcome portway_test_push(const FifoHandle *fifo, const u64 *words, u64 timeout_ns) {
  const Pushed pushed = push(*fifo, Trigger{{words[0], words[1]}}, timeout_ns);
  return {static_cast<u64>(pushed.status), pushed.position};
}

Outcome portway_test_push_batch(const FifoHandle *fifo, const u64 *words, u64 n, u64 timeout_ns) {
  std::vector<Trigger> triggers;
  for (u64 i = 0; i < n; i++) triggers.push_back({{words[2 * i], words[2 * i + 1]}});
  const Pushed pushed = push_batch(*fifo, triggers.data(), n, timeout_ns);
  return {static_cast<u64>(pushed.status), pushed.position};
}

u64 portway_test_sync(const FifoHandle *fifo, u64 position, u64 timeout_ns) {
  return static_cast<u64>(sync(*fifo, position, timeout_ns));
}

u64 portway_test_wait(const FifoHandle *fifo, u64 position, u64 timeout_ns) {
  return static_cast<u64>(wait(fifo->tail, fifo->flushed, position, timeout_ns).status);
}

// Starts the producers of `plan`. Every one of their calls has the handle's timeout, so all of them end.
Crew *portway_test_start(const FifoHandle *fifo, const Plan *plan) {
  auto crew = std::make_unique<Crew>();
  std::atomic<u64> *done = &crew->done;
  Gate *gate = &crew->gate;
  for (u64 id = 0; id < plan->producers; id++) {
    crew->producers.push_back(std::unique_ptr<Producer>(new Producer{*fifo, *plan, id}));
  }
  for (auto &each : crew->producers) {
    Producer *producer = each.get();
    crew->threads.emplace_back([=] {
      gate->pass();
      producer->plan.form == kScalar ? producer->scalar() : producer->batches();
      producer->finish(*done);
    });
  }
  gate->open();
  return crew.release();
}

// How many producers are done.
u64 portway_test_done(const Crew *crew) { return crew->done.load(); }

// Waits for the producers and copies a report each.
void portway_test_join(Crew *crew, Report *reports) {
  for (auto &thread : crew->threads) thread.join();
  for (auto &producer : crew->producers) *reports++ = producer->report;
  delete crew;
}

// Starts threads that each count themselves, make one call and note when it returned: `sync` of `position` if `syncs`, else a push.
Waiters *portway_test_wait_start(const FifoHandle *fifo, u64 count, u64 syncs, u64 position, u64 timeout_ns) {
  auto crew = std::make_unique<Waiters>();
  Gate *gate = &crew->gate;
  crew->reports.resize(count);
  for (u64 i = 0; i < count; i++) {
    Waiter *report = &crew->reports[i];
    std::atomic<u64> *entered = &crew->entered;
    crew->threads.emplace_back([=, fifo = *fifo] {
      gate->pass();
      entered->fetch_add(1);
      Pushed pushed = {Status::kOk, position};
      if (syncs) {
        pushed.status = sync(fifo, position, timeout_ns);
      } else {
        pushed = push(fifo, Trigger{{i, i}}, timeout_ns);
      }
      *report = {static_cast<u64>(pushed.status), pushed.position, platform::clock_ns()};
    });
  }
  gate->open();
  return crew.release();
}

u64 portway_test_wait_entered(const Waiters *crew) { return crew->entered.load(); }

void portway_test_wait_join(Waiters *crew, Waiter *reports) {
  for (auto &thread : crew->threads) thread.join();
  for (auto &report : crew->reports) *reports++ = report;
  delete crew;
}

} // extern "C"
