// A stand-in for NCCL, for tests on machines without a GPU.
//
// It plays the ranks of one process. A communicator is in progress until all its ranks have come, and so is a split; a
// child's handle is written when the last rank has split, as the real library does in the background. It asks the driver
// which device is current, as the real one does. Through the functions `standin_*` a test counts calls, makes a call
// fail, holds it, and looks at what was passed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS };

typedef struct { char bytes[128]; } id_t128;
struct config {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
  const char *net;
  int split_share, traffic;
  const char *name;
  int collnet, policy, shrink_share, nvls;
};

// ---- calls: counted, failed, held ----

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct function {
  const char *name;
  long calls, fail_at, waiting;
  int status, held;
} functions[64];

static struct function *function(const char *name) {
  for (int i = 0; i < 64; i++) {
    if (!functions[i].name) functions[i].name = strdup(name);
    if (!strcmp(functions[i].name, name)) return &functions[i];
  }
  abort();
}

// Counts a call and holds it if it is to be held. Returns with the lock held; not 0: the status to fail with.
static int enter(const char *name) {
  pthread_mutex_lock(&mutex);
  struct function *f = function(name);
  long call = ++f->calls;
  struct timespec end;
  clock_gettime(CLOCK_REALTIME, &end);
  end.tv_sec += 60; // a test that forgot to let go
  f->waiting++;
  while (f->held && !pthread_cond_timedwait(&changed, &mutex, &end)) {}
  f->waiting--;
  return call == f->fail_at ? f->status : SUCCESS;
}
static int leave(int status) {
  pthread_mutex_unlock(&mutex);
  return status;
}
#define ENTER(name)                          \
  do {                                       \
    int failed = enter(#name);               \
    if (failed) return leave(failed);        \
  } while (0)

EXPORT long standin_calls(const char *name) {
  pthread_mutex_lock(&mutex);
  long calls = function(name)->calls;
  return leave(0), calls;
}
EXPORT void standin_fail(const char *name, long nth, int status) {
  pthread_mutex_lock(&mutex);
  function(name)->fail_at = function(name)->calls + nth;
  function(name)->status = status;
  leave(0);
}
EXPORT void standin_hold(const char *name, long held) {
  pthread_mutex_lock(&mutex);
  function(name)->held = held != 0;
  pthread_cond_broadcast(&changed);
  leave(0);
}
EXPORT long standin_waiting(const char *name) {
  pthread_mutex_lock(&mutex);
  long waiting = function(name)->waiting;
  return leave(0), waiting;
}

// ---- what a test sets and sees ----

static int version = 22707, makes_blocking;
static long ballast;
static int (*current_device)(int *);
static struct config seen;
static int seen_ids, seen_excluded, seen_flags;

EXPORT void standin_set(const char *what, long value) {
  if (!strcmp(what, "version")) version = (int)value;
  else if (!strcmp(what, "makes blocking")) makes_blocking = (int)value;
  else if (!strcmp(what, "ballast")) ballast = value; // bytes more in each communicator
  else abort();
}
EXPORT int standin_driver(const char *path) {
  void *driver = dlopen(path, RTLD_NOW);
  if (driver) *(void **)&current_device = dlsym(driver, "cuCtxGetDevice");
  return current_device != NULL;
}
EXPORT long standin_seen(const char *what) {
  if (!strcmp(what, "size")) return (long)seen.size;
  if (!strcmp(what, "magic")) return (long)seen.magic;
  if (!strcmp(what, "version")) return (long)seen.version;
  if (!strcmp(what, "blocking")) return seen.blocking;
  if (!strcmp(what, "min ctas")) return seen.min_ctas;
  if (!strcmp(what, "split share")) return seen.split_share;
  if (!strcmp(what, "ids")) return seen_ids;
  if (!strcmp(what, "excluded")) return seen_excluded;
  if (!strcmp(what, "flags")) return seen_flags;
  abort();
}

// ---- communicators ----

struct comm {
  id_t128 id;
  int size, rank, device, state, finalized;
  // A split under way: of this colour, into this child, written there.
  int splitting, color, key;
  struct comm *child, **to;
};
static struct comm *comms[256];
static int live;
static __thread int depth, group_status;

EXPORT long standin_live(const char *unused) {
  (void)unused;
  pthread_mutex_lock(&mutex);
  long count = live;
  return leave(0), count;
}

static int known(struct comm *comm) {
  for (int i = 0; i < 256; i++) {
    if (comm && comms[i] == comm) return 1;
  }
  return 0;
}
static struct comm *add(id_t128 id, int size, int rank, int device) {
  struct comm *comm = calloc(1, sizeof *comm + ballast);
  memset(comm + 1, 1, ballast);
  comm->id = id, comm->size = size, comm->rank = rank, comm->device = device, comm->state = IN_PROGRESS;
  for (int i = 0; i < 256; i++) {
    if (!comms[i]) {
      live++;
      return comms[i] = comm;
    }
  }
  abort();
}
static int same(struct comm *a, struct comm *b) { return a && b && !memcmp(&a->id, &b->id, sizeof a->id); }

// Everybody is here: what was in progress is done.
static void complete(struct comm *of) {
  int count = 0;
  for (int i = 0; i < 256; i++) count += same(comms[i], of) && comms[i]->state == IN_PROGRESS;
  if (count < of->size) return;
  for (int i = 0; i < 256; i++) {
    struct comm *comm = comms[i];
    if (!same(comm, of)) continue;
    if (comm->splitting) {
      if (comm->child) {
        int size = 0, rank = 0;
        for (int j = 0; j < 256; j++) {
          if (!same(comms[j], of) || !comms[j]->child || comms[j]->color != comm->color) continue;
          size++;
          rank += comms[j]->key < comm->key || (comms[j]->key == comm->key && comms[j]->rank < comm->rank);
        }
        comm->child->size = size, comm->child->rank = rank, comm->child->state = SUCCESS;
      }
      __atomic_store_n(comm->to, comm->child, __ATOMIC_RELEASE);
    }
  }
  for (int i = 0; i < 256; i++) {
    if (same(comms[i], of)) comms[i]->state = SUCCESS, comms[i]->splitting = 0, comms[i]->child = NULL;
  }
}
static int device(void) {
  int device = -1;
  return current_device && !current_device(&device) ? device : -1;
}
static int noted(int status) {
  if (depth && status && status != IN_PROGRESS) group_status = status;
  return leave(status);
}

EXPORT int ncclGetVersion(int *out) {
  ENTER(ncclGetVersion);
  *out = version;
  return leave(SUCCESS);
}
EXPORT int ncclGetUniqueId(id_t128 *id) {
  static int count;
  ENTER(ncclGetUniqueId);
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "id %d", ++count);
  return leave(SUCCESS);
}
EXPORT const char *ncclGetErrorString(int status) { return status == IN_PROGRESS ? "in progress" : status ? "a failure" : "no error"; }
EXPORT const char *ncclGetLastError(void *comm) { return comm ? "the last error" : ""; }
EXPORT int ncclGroupStart(void) {
  ENTER(ncclGroupStart);
  depth++;
  group_status = SUCCESS;
  return leave(SUCCESS);
}
static int init(struct comm **out, int size, id_t128 id, int rank, struct config *config, int ids) {
  int on = device();
  seen = (struct config){0};
  memcpy(&seen, config, config->size < sizeof seen ? config->size : sizeof seen);
  seen_ids = ids;
  if (makes_blocking) config->blocking = 1;
  *out = NULL;
  if (on < 0) return noted(CUDA_ERROR);
  if (rank < 0 || rank >= size) return noted(INVALID_ARGUMENT);
  *out = add(id, size, rank, on);
  complete(*out);
  return leave(IN_PROGRESS);
}
EXPORT int ncclCommInitRankConfig(struct comm **out, int size, id_t128 id, int rank, struct config *config) {
  int failed = enter("ncclCommInitRankConfig");
  if (failed) return noted(failed);
  return init(out, size, id, rank, config, 1);
}
EXPORT int ncclCommInitRankScalable(struct comm **out, int size, int rank, int count, id_t128 *ids, struct config *config) {
  int failed = enter("ncclCommInitRankScalable");
  if (failed) return noted(failed);
  return init(out, size, ids[0], rank, config, count);
}

static int split(struct comm *parent, int color, int key, struct comm **to) {
  if (!known(parent)) return noted(INVALID_ARGUMENT);
  if (parent->state != SUCCESS) return noted(INVALID_USAGE);
  *to = NULL;
  id_t128 id = parent->id;
  snprintf(id.bytes + 64, 64, "child %d", color);
  parent->state = IN_PROGRESS, parent->splitting = 1, parent->color = color, parent->key = key, parent->to = to;
  parent->child = color >= 0 ? add(id, 1, 0, parent->device) : NULL;
  complete(parent);
  return leave(IN_PROGRESS);
}
EXPORT int ncclCommSplit(struct comm *parent, int color, int key, struct comm **to, struct config *config) {
  (void)config;
  int failed = enter("ncclCommSplit");
  if (failed) return noted(failed);
  return split(parent, color, key, to);
}
EXPORT int ncclCommShrink(struct comm *parent, int *excluded, int count, struct comm **to, struct config *config, int flags) {
  (void)config, (void)excluded;
  int failed = enter("ncclCommShrink");
  if (failed) return noted(failed);
  seen_excluded = count, seen_flags = flags;
  if (known(parent)) parent->size -= count;
  return split(parent, 0, parent->rank, to);
}
EXPORT int ncclCommRevoke(struct comm *comm, int flags) {
  ENTER(ncclCommRevoke);
  return leave(known(comm) && !flags ? SUCCESS : INVALID_ARGUMENT);
}
EXPORT int ncclCommFinalize(struct comm *comm) {
  ENTER(ncclCommFinalize);
  if (!known(comm)) return noted(INVALID_ARGUMENT);
  comm->finalized = 1;
  return leave(SUCCESS);
}
static int drop(struct comm *comm) {
  if (!known(comm)) return leave(INVALID_ARGUMENT);
  // The thread of a split that is aborted ends, and tells of the child that it has begun.
  if (comm->splitting) {
    if (comm->child) comm->child->state = REMOTE_ERROR;
    __atomic_store_n(comm->to, comm->child, __ATOMIC_RELEASE);
  }
  for (int i = 0; i < 256; i++) {
    if (comms[i] == comm) comms[i] = NULL;
  }
  free(comm);
  live--;
  return leave(SUCCESS);
}
EXPORT int ncclCommDestroy(struct comm *comm) {
  ENTER(ncclCommDestroy);
  return drop(comm);
}
EXPORT int ncclCommAbort(struct comm *comm) {
  ENTER(ncclCommAbort);
  return drop(comm);
}
EXPORT int ncclCommGetAsyncError(struct comm *comm, int *state) {
  ENTER(ncclCommGetAsyncError);
  if (!known(comm)) return leave(INVALID_ARGUMENT);
  *state = comm->state;
  return leave(SUCCESS);
}
#define ASK(name, field)                                    \
  EXPORT int name(struct comm *comm, int *out) {            \
    ENTER(name);                                            \
    if (!known(comm)) return leave(INVALID_ARGUMENT);       \
    *out = comm->field;                                     \
    return leave(SUCCESS);                                  \
  }
ASK(ncclCommCount, size)
ASK(ncclCommUserRank, rank)
ASK(ncclCommCuDevice, device)

// Operations: checked and counted, and done at the end of the group if all ranks that take part have called.
enum { ALL_REDUCE, ALL_GATHER, SEND, RECV };
static struct operation {
  int kind;
  const void *send;
  void *recv;
  size_t count;
  int type, op, peer;
  struct comm *comm;
} pending[256];
static int pending_count;
static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

// The sum of all, of 32-bit integers and single precision; of other types and kinds nothing is made.
static void all_reduce(struct operation **all, int count) {
  for (size_t at = 0; at < all[0]->count && !all[0]->op; at++) {
    int integer = 0;
    float single = 0;
    for (int i = 0; i < count; i++) {
      if (all[0]->type == 2) integer += ((const int *)all[i]->send)[at];
      if (all[0]->type == 7) single += ((const float *)all[i]->send)[at];
    }
    for (int i = 0; i < count; i++) {
      if (all[0]->type == 2) ((int *)all[i]->recv)[at] = integer;
      if (all[0]->type == 7) ((float *)all[i]->recv)[at] = single;
    }
  }
}

static void operate(void) {
  for (int i = 0; i < pending_count; i++) {
    struct operation *first = &pending[i], *all[256];
    int count = 0;
    for (int j = i; j < pending_count; j++) {
      if (pending[j].comm && pending[j].kind == first->kind && same(pending[j].comm, first->comm)) all[count++] = &pending[j];
    }
    if (!first->comm) continue;
    size_t bytes = first->count * sizes[first->type];
    if (first->kind == ALL_REDUCE && count == first->comm->size) all_reduce(all, count);
    if (first->kind == ALL_GATHER && count == first->comm->size) {
      for (int to = 0; to < count; to++) {
        for (int from = 0; from < count; from++) memcpy((char *)all[to]->recv + bytes * (size_t)all[from]->comm->rank, all[from]->send, bytes);
      }
    }
    for (int j = 0; first->kind == SEND && j < pending_count; j++) {
      struct operation *to = &pending[j];
      if (to->kind != RECV || !same(to->comm, first->comm) || to->comm->rank != first->peer || to->peer != first->comm->rank) continue;
      memcpy(to->recv, first->send, bytes);
      break;
    }
    if (first->kind != SEND && first->kind != RECV) {
      for (int j = 0; j < count; j++) all[j]->comm = NULL;
    }
  }
  pending_count = 0;
}
static int operation(int kind, struct operation operation) {
  operation.kind = kind;
  if (!known(operation.comm) || !operation.count || pending_count == 256) return noted(INVALID_ARGUMENT);
  if (device() != operation.comm->device) return noted(CUDA_ERROR);
  pending[pending_count++] = operation;
  return noted(SUCCESS);
}
#define OPERATION(name, kind, values, ...)                                              \
  EXPORT int name(__VA_ARGS__) {                                                        \
    (void)stream;                                                                       \
    int failed = enter(#name);                                                          \
    if (failed) return noted(failed);                                                   \
    return operation(kind, (struct operation)values);                                   \
  }
#define VALUES(...) {.count = count, .type = type, .comm = comm, __VA_ARGS__}
OPERATION(ncclAllReduce, ALL_REDUCE, VALUES(.send = send, .recv = recv, .op = op), const void *send, void *recv, size_t count, int type, int op, struct comm *comm, void *stream)
OPERATION(ncclAllGather, ALL_GATHER, VALUES(.send = send, .recv = recv), const void *send, void *recv, size_t count, int type, struct comm *comm, void *stream)
OPERATION(ncclSend, SEND, VALUES(.send = send, .peer = peer), const void *send, size_t count, int type, int peer, struct comm *comm, void *stream)
OPERATION(ncclRecv, RECV, VALUES(.recv = recv, .peer = peer), void *recv, size_t count, int type, int peer, struct comm *comm, void *stream)

EXPORT int ncclGroupEnd(void) {
  int failed = enter("ncclGroupEnd");
  depth--;
  if (!group_status && !failed) operate();
  else pending_count = 0;
  return leave(failed ? failed : group_status ? group_status : IN_PROGRESS);
}
