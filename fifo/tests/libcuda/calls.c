// A stand-in for the CUDA driver, for tests on machines without a GPU.
//
// It exports the driver's functions and plays devices whose memory is memory of this process: allocations are mapped,
// copies are copied, streams finish at once. It checks what the real driver checks (handles, lengths, a current
// context) and answers with the real codes. Through the functions `standin_*` of control.c a test counts calls by
// function and thread, makes a call fail, and holds a call until it lets go.
//
// Compiled as one text: calls.c, objects.c, devices.c, memory.c, streams.c, control.c, in this order.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;

enum {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  HOST_MEMORY_ALREADY_REGISTERED = 712,
  NOT_PERMITTED = 800,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
};

#define GRANULARITY (2ull << 20)
#define MAX_FUNCTIONS 128
#define MAX_THREADS 8192
#define MAX_OBJECTS 4096
#define MAX_ATTRIBUTES 256

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void lock(void) { pthread_mutex_lock(&mutex); }
static int unlock(int status) {
  pthread_mutex_unlock(&mutex);
  return status;
}

// ---- calls: counted, failed, held ----

static struct function {
  const char *name;
  long calls;
  long fail_from, fail_to; // numbers of the calls that fail, from inclusive to exclusive
  int status;
  int held; // 0: no call waits; 1: all do; 2: the next one is to; 3: that one does
  long waiting;
} functions[MAX_FUNCTIONS];

static struct thread {
  long id;
  long calls[MAX_FUNCTIONS];
} threads[MAX_THREADS];

static __thread int mode; // the stream capture mode
static int strict;        // whether calls that capture restricts fail unless that mode is relaxed

static int function(const char *name) {
  for (int i = 0; i < MAX_FUNCTIONS; i++) {
    if (!functions[i].name) functions[i].name = name;
    if (!strcmp(functions[i].name, name)) return i;
  }
  abort();
}

static struct thread *thread(long id) {
  for (int i = 0; i < MAX_THREADS; i++) {
    if (!threads[i].id) threads[i].id = id;
    if (threads[i].id == id) return &threads[i];
  }
  abort();
}

// Counts a call and does to it what the test has asked for. Returns with the lock held if it returns 0.
static int enter(const char *name) {
  lock();
  int index = function(name);
  struct function *f = &functions[index];
  f->calls++;
  thread(syscall(SYS_gettid))->calls[index]++;
  if (f->calls >= f->fail_from && f->calls < f->fail_to) return unlock(f->status);
  if (f->held == 1 || f->held == 2) {
    if (f->held == 2) f->held = 3;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 60;
    f->waiting++;
    pthread_cond_broadcast(&changed);
    while (f->held) {
      if (pthread_cond_timedwait(&changed, &mutex, &end)) {
        fprintf(stderr, "stand-in: %s was held for 60 s and nobody released it\n", name);
        abort();
      }
    }
    f->waiting--;
  }
  return 0;
}

#define ENTER(name)                        \
  do {                                     \
    int status = enter(#name);             \
    if (status) return status;             \
  } while (0)

#define EXPORT __attribute__((visibility("default")))
