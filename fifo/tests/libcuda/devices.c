// The driver, its devices and their contexts. Part of the stand-in, see calls.c.

static int devices = 2;
static int driver_version = 13000;
static int loading_mode = 1;
static u64 pinned_shift; // how far the device's address of page-locked memory is off the processor's
static int attributes[MAX_ATTRIBUTES] = {
    [16] = 132, [41] = 1, [75] = 9, [76] = 0, [102] = 1, [103] = 1, [110] = 1,
    [115] = 1,  [116] = 1, [118] = 100, [122] = 1, [124] = 1, [128] = 1,
};
static int fabric_allowed; // whether the process may make memory that has fabric handles
static int uuid_base = 0x10; // the first byte of the first device's UUID
static int peer_access = 1; // whether devices reach each other
static int opens_own; // whether a process may open its own legacy handles, as the real driver does not let it
static struct object *primary[16];

static __thread struct object *stack[16];
static __thread int depth;

static struct object *current(void) { return depth ? stack[depth - 1] : NULL; }

// For functions that need a context and that stream capture restricts. The lock is held.
static int check(void) {
  if (!current() || current()->kind != CONTEXT) return INVALID_CONTEXT;
  if (strict && mode != 2) return CAPTURE_UNSUPPORTED;
  return 0;
}

#define ENTER_CURRENT(name)                       \
  do {                                            \
    ENTER(name);                                  \
    int status = check();                         \
    if (status) return unlock(status);            \
  } while (0)

EXPORT int cuInit(unsigned flags) {
  ENTER(cuInit);
  return unlock(flags ? INVALID_VALUE : devices ? SUCCESS : NO_DEVICE);
}
EXPORT int cuDriverGetVersion(int *version) {
  ENTER(cuDriverGetVersion);
  *version = driver_version;
  return unlock(SUCCESS);
}
EXPORT int cuGetErrorName(int status, const char **name) {
  static const struct {
    int status;
    const char *name;
  } names[] = {
      {1, "CUDA_ERROR_INVALID_VALUE"},   {2, "CUDA_ERROR_OUT_OF_MEMORY"},   {100, "CUDA_ERROR_NO_DEVICE"},
      {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
      {500, "CUDA_ERROR_NOT_FOUND"},     {600, "CUDA_ERROR_NOT_READY"},     {800, "CUDA_ERROR_NOT_PERMITTED"},
      {704, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"}, {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
      {801, "CUDA_ERROR_NOT_SUPPORTED"},
  };
  ENTER(cuGetErrorName);
  *name = NULL;
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (names[i].status == status) *name = names[i].name;
  }
  return unlock(*name ? SUCCESS : INVALID_VALUE);
}
EXPORT int cuDeviceGetCount(int *count) {
  ENTER(cuDeviceGetCount);
  *count = devices;
  return unlock(SUCCESS);
}
EXPORT int cuDeviceGet(int *device, int ordinal) {
  ENTER(cuDeviceGet);
  if (ordinal < 0 || ordinal >= devices) return unlock(INVALID_DEVICE);
  *device = ordinal;
  return unlock(SUCCESS);
}
EXPORT int cuDeviceGetName(char *name, int len, int device) {
  ENTER(cuDeviceGetName);
  snprintf(name, (size_t)len, "Stand-in %d", device);
  return unlock(SUCCESS);
}
EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  ENTER(cuDeviceGetUuid_v2);
  memset(uuid, uuid_base + device, 16);
  return unlock(SUCCESS);
}
EXPORT int cuDeviceGetPCIBusId(char *id, int len, int device) {
  ENTER(cuDeviceGetPCIBusId);
  snprintf(id, (size_t)len, "0000:%02X:00.0", 0x3b + device);
  return unlock(SUCCESS);
}
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  ENTER(cuDeviceGetAttribute);
  if (attribute < 1 || attribute >= MAX_ATTRIBUTES || attributes[attribute] < 0 || device >= devices) {
    return unlock(INVALID_VALUE);
  }
  *value = attributes[attribute];
  return unlock(SUCCESS);
}
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (device < 0 || device >= devices) return unlock(INVALID_DEVICE);
  if (primary[device]) {
    primary[device]->shares++;
  } else {
    primary[device] = add(CONTEXT);
    primary[device]->device = device;
  }
  *context = primary[device];
  return unlock(SUCCESS);
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER(cuDevicePrimaryCtxRelease_v2);
  if (device < 0 || device >= devices || !primary[device]) return unlock(INVALID_CONTEXT);
  if (!--primary[device]->shares) {
    primary[device]->kind = NOTHING;
    primary[device] = NULL;
  }
  return unlock(SUCCESS);
}
EXPORT int cuCtxPushCurrent_v2(void *context) {
  ENTER(cuCtxPushCurrent_v2);
  if (!as(context, CONTEXT) || depth == 16) return unlock(INVALID_CONTEXT);
  stack[depth++] = context;
  return unlock(SUCCESS);
}
EXPORT int cuCtxPopCurrent_v2(void **context) {
  ENTER(cuCtxPopCurrent_v2);
  if (!depth) return unlock(INVALID_CONTEXT);
  *context = stack[--depth];
  return unlock(SUCCESS);
}
EXPORT int cuCtxSetCurrent(void *context) {
  ENTER(cuCtxSetCurrent);
  if (!depth) depth = 1;
  stack[depth - 1] = context;
  return unlock(SUCCESS);
}
EXPORT int cuCtxGetCurrent(void **context) {
  ENTER(cuCtxGetCurrent);
  *context = current();
  return unlock(SUCCESS);
}
EXPORT int cuCtxGetDevice(int *device) {
  ENTER_CURRENT(cuCtxGetDevice);
  *device = current()->device;
  return unlock(SUCCESS);
}
EXPORT int cuCtxSynchronize(void) {
  ENTER_CURRENT(cuCtxSynchronize);
  return unlock(SUCCESS);
}
EXPORT int cuThreadExchangeStreamCaptureMode(int *exchange) {
  ENTER(cuThreadExchangeStreamCaptureMode);
  int before = mode;
  mode = *exchange;
  *exchange = before;
  return unlock(SUCCESS);
}
EXPORT int cuDeviceCanAccessPeer(int *can, int device, int peer) {
  ENTER(cuDeviceCanAccessPeer);
  if (device < 0 || device >= devices || peer < 0 || peer >= devices) return unlock(INVALID_DEVICE);
  *can = peer_access && device != peer;
  return unlock(SUCCESS);
}
EXPORT int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
  ENTER_CURRENT(cuCtxEnablePeerAccess);
  struct object *o = as(peer, CONTEXT);
  if (!o || flags) return unlock(INVALID_VALUE);
  if (!peer_access || o->device == current()->device) return unlock(INVALID_DEVICE);
  static char enabled[16][16];
  if (enabled[current()->device][o->device]) return unlock(PEER_ACCESS_ALREADY_ENABLED);
  enabled[current()->device][o->device] = 1;
  return unlock(SUCCESS);
}
