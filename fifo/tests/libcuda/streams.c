// Streams, copies and kernels. Part of the stand-in, see calls.c.
//
// A stream does what it is given at once, unless streams are paused: then it keeps what it is given until they go on.

struct work {
  struct work *next;
  u64 to, from, len; // a copy
  u64 address, value; // else a value, or nothing at all
};
static int paused;

static void carry_out(const struct work *w) {
  // What is not there any more is the program's mistake: on a device it would be a fault.
  if (w->len && reachable(w->to, w->len) && reachable(w->from, w->len)) {
    memmove((void *)w->to, (void *)w->from, w->len);
  }
  if (w->address && reachable(w->address, 8)) __atomic_store_n((u64 *)w->address, w->value, __ATOMIC_RELEASE);
}
static void give(struct object *stream, struct work w) {
  if (!paused || !stream) {
    carry_out(&w);
    return;
  }
  struct work *kept = malloc(sizeof *kept);
  *kept = w;
  kept->next = NULL;
  if (stream->last) stream->last->next = kept;
  else stream->first = kept;
  stream->last = kept;
}
static void drain(struct object *stream, int carry) {
  while (stream->first) {
    struct work *w = stream->first;
    stream->first = w->next;
    if (carry) carry_out(w);
    free(w);
  }
  stream->last = NULL;
}
// 1: streams do nothing more. 0: they do all that they were given, and go on.
static void pause_streams(int pause) {
  paused = pause;
  for (int i = 1; i < MAX_OBJECTS && !paused; i++) {
    if (objects[i].kind == STREAM) drain(&objects[i], 1);
  }
}

EXPORT int cuStreamCreate(void **stream, unsigned flags) {
  ENTER_CURRENT(cuStreamCreate);
  if (flags > 1) return unlock(INVALID_VALUE);
  *stream = add(STREAM);
  return unlock(SUCCESS);
}
EXPORT int cuStreamDestroy_v2(void *stream) {
  ENTER_CURRENT(cuStreamDestroy_v2);
  struct object *o = as(stream, STREAM);
  if (!o) return unlock(INVALID_HANDLE);
  drain(o, 0);
  o->kind = NOTHING;
  return unlock(SUCCESS);
}
EXPORT int cuStreamQuery(void *stream) {
  ENTER_CURRENT(cuStreamQuery);
  struct object *o = as(stream, STREAM);
  if (stream && !o) return unlock(INVALID_HANDLE);
  return unlock(o && o->first ? NOT_READY : SUCCESS);
}
EXPORT int cuStreamSynchronize(void *stream) {
  ENTER_CURRENT(cuStreamSynchronize);
  return unlock(!stream || as(stream, STREAM) ? SUCCESS : INVALID_HANDLE);
}
EXPORT int cuStreamWriteValue64_v2(void *stream, u64 address, u64 value, unsigned flags) {
  ENTER_CURRENT(cuStreamWriteValue64_v2);
  if (flags || (stream && !as(stream, STREAM))) return unlock(INVALID_VALUE);
  if (!reachable(address, 8)) return unlock(INVALID_VALUE);
  give(stream, (struct work){.address = address, .value = value});
  return unlock(SUCCESS);
}
EXPORT int cuMemcpyAsync(u64 to, u64 from, size_t len, void *stream) {
  ENTER_CURRENT(cuMemcpyAsync);
  if (!len || !reachable(to, len) || !reachable(from, len) || (stream && !as(stream, STREAM))) {
    return unlock(INVALID_VALUE);
  }
  give(stream, (struct work){.to = to, .from = from, .len = len});
  return unlock(SUCCESS);
}
EXPORT int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t len, void *stream) {
  ENTER_CURRENT(cuMemcpyDtoHAsync_v2);
  if (!covered(from, len) || (stream && !as(stream, STREAM))) return unlock(INVALID_VALUE);
  memcpy(to, (void *)from, len);
  return unlock(SUCCESS);
}
EXPORT int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t len, void *stream) {
  ENTER_CURRENT(cuMemcpyHtoDAsync_v2);
  if (!covered(to, len) || (stream && !as(stream, STREAM))) return unlock(INVALID_VALUE);
  memcpy((void *)to, from, len);
  return unlock(SUCCESS);
}
EXPORT int cuMemsetD8Async(u64 to, unsigned char value, size_t len, void *stream) {
  ENTER_CURRENT(cuMemsetD8Async);
  if (!covered(to, len) || (stream && !as(stream, STREAM))) return unlock(INVALID_VALUE);
  memset((void *)to, value, len);
  return unlock(SUCCESS);
}
EXPORT int cuEventCreate(void **event, unsigned flags) {
  ENTER_CURRENT(cuEventCreate);
  (void)flags;
  *event = add(EVENT);
  return unlock(SUCCESS);
}
EXPORT int cuEventDestroy_v2(void *event) {
  ENTER_CURRENT(cuEventDestroy_v2);
  struct object *o = as(event, EVENT);
  if (!o) return unlock(INVALID_HANDLE);
  o->kind = NOTHING;
  return unlock(SUCCESS);
}
EXPORT int cuEventRecord(void *event, void *stream) {
  ENTER_CURRENT(cuEventRecord);
  (void)stream;
  return unlock(as(event, EVENT) ? SUCCESS : INVALID_HANDLE);
}
EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  ENTER_CURRENT(cuStreamWaitEvent);
  (void)stream;
  (void)flags;
  return unlock(as(event, EVENT) ? SUCCESS : INVALID_HANDLE);
}

// ---- kernels: found by any name but "missing", and run by doing nothing ----

EXPORT int cuModuleGetLoadingMode(int *out) {
  ENTER(cuModuleGetLoadingMode);
  *out = loading_mode;
  return unlock(SUCCESS);
}
EXPORT int cuModuleLoadData(void **module, const void *image) {
  ENTER_CURRENT(cuModuleLoadData);
  if ((u64)image % 8 || !*(const char *)image) return unlock(INVALID_VALUE);
  *module = add(MODULE);
  return unlock(SUCCESS);
}
EXPORT int cuModuleUnload(void *module) {
  ENTER_CURRENT(cuModuleUnload);
  struct object *m = as(module, MODULE);
  if (!m) return unlock(INVALID_HANDLE);
  for (int i = 1; i < MAX_OBJECTS; i++) {
    if (objects[i].kind == KERNEL && objects[i].of == m) objects[i].kind = NOTHING;
  }
  m->kind = NOTHING;
  return unlock(SUCCESS);
}
EXPORT int cuModuleGetFunction(void **kernel, void *module, const char *name) {
  ENTER_CURRENT(cuModuleGetFunction);
  if (!as(module, MODULE)) return unlock(INVALID_HANDLE);
  if (!strcmp(name, "missing")) return unlock(NOT_FOUND);
  struct object *o = add(KERNEL);
  o->of = module;
  *kernel = o;
  return unlock(SUCCESS);
}
EXPORT int cuFuncLoad(void *kernel) {
  ENTER_CURRENT(cuFuncLoad);
  return unlock(as(kernel, KERNEL) ? SUCCESS : INVALID_HANDLE);
}
EXPORT int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
  ENTER_CURRENT(cuLaunchKernel);
  (void)shared;
  if (!as(kernel, KERNEL)) return unlock(INVALID_HANDLE);
  if (!gx || !gy || !gz || !bx || !by || !bz || extra || !parameters) return unlock(INVALID_VALUE);
  return unlock(!stream || as(stream, STREAM) ? SUCCESS : INVALID_HANDLE);
}
