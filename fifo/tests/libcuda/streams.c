// Streams, copies and kernels. Part of the stand-in, see calls.c.

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
  o->kind = NOTHING;
  return unlock(SUCCESS);
}
EXPORT int cuStreamQuery(void *stream) {
  ENTER_CURRENT(cuStreamQuery);
  return unlock(!stream || as(stream, STREAM) ? SUCCESS : INVALID_HANDLE);
}
EXPORT int cuStreamSynchronize(void *stream) {
  ENTER_CURRENT(cuStreamSynchronize);
  return unlock(!stream || as(stream, STREAM) ? SUCCESS : INVALID_HANDLE);
}
EXPORT int cuStreamWriteValue64_v2(void *stream, u64 address, u64 value, unsigned flags) {
  ENTER_CURRENT(cuStreamWriteValue64_v2);
  if (flags || (stream && !as(stream, STREAM))) return unlock(INVALID_VALUE);
  if (!memory(address, HOST, HOST) && !covered(address, 8)) return unlock(INVALID_VALUE);
  __atomic_store_n((u64 *)address, value, __ATOMIC_RELEASE);
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
