// Kernels that run. Goes behind the text of the stand-in driver of fifo/tests/libcuda, of which it replaces what only pretends
// to: a module is a library that the stand-in compiler made, and a kernel is run by threads of the processor, one a block.
#include <dlfcn.h>

// What a kernel has in its library.
typedef void (*launcher)(void **parameters, unsigned blocks, void (*before)(void *), void (*after)(void *), void *turn);

// Kernels of a stream run one after the other.
static struct turns {
  long given, served;
} turns[MAX_OBJECTS];

struct turn {
  struct turns *of;
  long number;
};

static void await_turn(void *argument) {
  struct turn *turn = argument;
  lock();
  while (turn->of->served != turn->number) pthread_cond_wait(&changed, &mutex);
  unlock(0);
}

static void end_turn(void *argument) {
  struct turn *turn = argument;
  lock();
  turn->of->served++;
  pthread_cond_broadcast(&changed);
  unlock(0);
  free(turn);
}

static struct turns *turns_of(void *stream) { return &turns[(struct object *)stream - objects]; }

EXPORT int cuModuleLoadData(void **module, const void *image) {
  ENTER_CURRENT(cuModuleLoadData);
  void *library = dlopen(image, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "stand-in: %s\n", dlerror());
    return unlock(INVALID_VALUE);
  }
  struct object *o = add(MODULE);
  o->address = (u64)library;
  *module = o;
  return unlock(SUCCESS);
}

EXPORT int cuModuleGetFunction(void **kernel, void *module, const char *name) {
  ENTER_CURRENT(cuModuleGetFunction);
  struct object *m = as(module, MODULE);
  if (!m) return unlock(INVALID_HANDLE);
  char symbol[256];
  snprintf(symbol, sizeof symbol, "launch_%s", name);
  void *found = dlsym((void *)m->address, symbol);
  if (!found) return unlock(NOT_FOUND);
  struct object *o = add(KERNEL);
  o->of = module;
  o->address = (u64)found;
  *kernel = o;
  return unlock(SUCCESS);
}

EXPORT int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
  ENTER_CURRENT(cuLaunchKernel);
  (void)shared;
  struct object *k = as(kernel, KERNEL);
  if (!k || !as(stream, STREAM)) return unlock(INVALID_HANDLE);
  if (!gx || gy != 1 || gz != 1 || !bx || by != 1 || bz != 1 || extra || !parameters) return unlock(INVALID_VALUE);
  struct turn *turn = malloc(sizeof *turn);
  *turn = (struct turn){turns_of(stream), turns_of(stream)->given++};
  ((launcher)k->address)(parameters, gx, await_turn, end_turn, turn);
  return unlock(SUCCESS);
}

EXPORT int cuStreamQuery(void *stream) {
  ENTER_CURRENT(cuStreamQuery);
  struct object *o = as(stream, STREAM);
  if (!o) return unlock(INVALID_HANDLE);
  return unlock(turns_of(stream)->served != turns_of(stream)->given ? NOT_READY : SUCCESS);
}

EXPORT int cuMemcpyPeerAsync(u64 to, void *to_context, u64 from, void *from_context, size_t len, void *stream) {
  ENTER_CURRENT(cuMemcpyPeerAsync);
  if (!as(to_context, CONTEXT) || !as(from_context, CONTEXT) || !as(stream, STREAM)) return unlock(INVALID_HANDLE);
  if (!len || !covered(to, len) || !covered(from, len)) return unlock(INVALID_VALUE);
  memcpy((void *)to, (void *)from, len);
  return unlock(SUCCESS);
}

// Few enough that their threads have turns on the processors of a small machine.
__attribute__((constructor)) static void a_small_device(void) { attributes[16] = 1; }
