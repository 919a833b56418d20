// Memory: in one piece, and piece by piece. Part of the stand-in, see calls.c.

EXPORT int cuMemHostAlloc(void **host, size_t len, unsigned flags) {
  ENTER_CURRENT(cuMemHostAlloc);
  if (!len || flags & ~7u) return unlock(INVALID_VALUE);
  *host = (void *)allocate(HOST, len)->address;
  return unlock(SUCCESS);
}
EXPORT int cuMemHostGetDevicePointer_v2(u64 *address, void *host, unsigned flags) {
  ENTER_CURRENT(cuMemHostGetDevicePointer_v2);
  if (flags || !host_memory((u64)host)) return unlock(INVALID_VALUE);
  *address = (u64)host + pinned_shift;
  return unlock(SUCCESS);
}
static int free_memory(u64 address, enum kind kind) {
  struct object *o = memory(address, kind, kind);
  if (!o || o->address != address) return INVALID_VALUE;
  deallocate(o);
  return SUCCESS;
}
EXPORT int cuMemFreeHost(void *host) {
  ENTER_CURRENT(cuMemFreeHost);
  return unlock(free_memory((u64)host, HOST));
}
EXPORT int cuMemHostRegister_v2(void *host, size_t len, unsigned flags) {
  ENTER_CURRENT(cuMemHostRegister_v2);
  if (!host || !len || flags & ~15u) return unlock(INVALID_VALUE);
  if (host_memory((u64)host)) return unlock(HOST_MEMORY_ALREADY_REGISTERED);
  struct object *o = add(REGISTERED);
  o->address = (u64)host;
  o->len = len;
  return unlock(SUCCESS);
}
EXPORT int cuMemHostUnregister(void *host) {
  ENTER_CURRENT(cuMemHostUnregister);
  struct object *o = memory((u64)host, REGISTERED, REGISTERED);
  if (!o || o->address != (u64)host) return unlock(INVALID_VALUE);
  o->kind = NOTHING;
  return unlock(SUCCESS);
}
EXPORT int cuMemAlloc_v2(u64 *address, size_t len) {
  ENTER_CURRENT(cuMemAlloc_v2);
  if (!len) return unlock(INVALID_VALUE);
  struct object *o = allocate(LEGACY, len);
  o->device = current()->device;
  *address = o->address;
  return unlock(SUCCESS);
}
EXPORT int cuMemFree_v2(u64 address) {
  ENTER_CURRENT(cuMemFree_v2);
  return unlock(free_memory(address, LEGACY));
}
EXPORT int cuMemAllocAsync(u64 *address, size_t len, void *stream) {
  ENTER_CURRENT(cuMemAllocAsync);
  if (!len || (stream && !as(stream, STREAM))) return unlock(INVALID_VALUE);
  struct object *o = allocate(POOL, len);
  o->device = current()->device;
  *address = o->address;
  return unlock(SUCCESS);
}
EXPORT int cuMemFreeAsync(u64 address, void *stream) {
  ENTER_CURRENT(cuMemFreeAsync);
  if (stream && !as(stream, STREAM)) return unlock(INVALID_HANDLE);
  return unlock(free_memory(address, POOL));
}
EXPORT int cuMemGetAddressRange_v2(u64 *base, size_t *len, u64 address) {
  ENTER_CURRENT(cuMemGetAddressRange_v2);
  struct object *o = device_memory(address);
  if (!o) return unlock(NOT_FOUND);
  *base = o->address;
  *len = o->len;
  return unlock(SUCCESS);
}
// Attributes have lengths of their own: one byte, four or eight are written.
EXPORT int cuPointerGetAttribute(void *data, int attribute, u64 address) {
  ENTER_CURRENT(cuPointerGetAttribute);
  struct object *host = host_memory(address);
  struct object *o = host ? host : device_memory(address);
  if (!o) return unlock(INVALID_VALUE);
  switch (attribute) {
    case 2: *(unsigned *)data = host ? 1 : 2; break;
    case 3: *(u64 *)data = host ? address + pinned_shift : address; break;
    case 8: *(unsigned char *)data = 0; break;
    case 9: *(int *)data = o->device; break;
    case 10: *(unsigned char *)data = o->kind == LEGACY; break;
    case 14: *(u64 *)data = o->kind == MAPPING ? (u64)o->of->handle_types : 0; break;
    case 17: *(u64 *)data = o->kind == POOL ? 0x1000 : 0; break;
    default: return unlock(INVALID_VALUE);
  }
  return unlock(SUCCESS);
}
EXPORT int cuIpcGetMemHandle(unsigned char *handle, u64 address) {
  ENTER_CURRENT(cuIpcGetMemHandle);
  struct object *o = memory(address, LEGACY, LEGACY);
  if (!o) return unlock(INVALID_VALUE);
  struct foreign f = {getpid(), o->fd, o->len, o->device};
  memset(handle, 0, 64);
  memcpy(handle, &f, sizeof f);
  return unlock(SUCCESS);
}
struct legacy_handle {
  unsigned char bytes[64];
};
EXPORT int cuIpcOpenMemHandle_v2(u64 *address, struct legacy_handle handle, unsigned flags) {
  ENTER_CURRENT(cuIpcOpenMemHandle_v2);
  struct foreign f;
  memcpy(&f, handle.bytes, sizeof f);
  if (flags != 1) return unlock(INVALID_VALUE);
  if (f.pid == getpid() && !opens_own) return unlock(INVALID_CONTEXT); // never in the process that it comes from
  int fd = open_foreign(&f);
  if (fd < 0) return unlock(INVALID_VALUE);
  void *p = mmap(NULL, page_up(f.len), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) abort();
  struct object *o = add(OPENED);
  o->address = (u64)p;
  o->len = f.len;
  o->fd = fd;
  o->device = f.device < devices ? f.device : 0;
  *address = o->address;
  return unlock(SUCCESS);
}
EXPORT int cuIpcCloseMemHandle(u64 address) {
  ENTER_CURRENT(cuIpcCloseMemHandle);
  return unlock(free_memory(address, OPENED));
}

// ---- memory, piece by piece ----

struct location {
  int kind, id;
};
struct properties {
  int kind, handle_types;
  struct location location;
  void *windows_only;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct access {
  struct location location;
  int flags;
};

static int bad_properties(const struct properties *p) {
  static const unsigned char zeros[4];
  return p->kind != 1 || p->location.kind != 1 || p->location.id < 0 || p->location.id >= devices || p->windows_only ||
         p->compression || p->usage || memcmp(p->reserved, zeros, 4) || p->handle_types & ~9;
}
EXPORT int cuMemGetAllocationGranularity(size_t *len, const struct properties *p, int option) {
  ENTER_CURRENT(cuMemGetAllocationGranularity);
  if (bad_properties(p) || option < 0 || option > 1) return unlock(INVALID_VALUE);
  *len = GRANULARITY;
  return unlock(SUCCESS);
}
EXPORT int cuMemAddressReserve(u64 *address, size_t len, size_t align, u64 at, u64 flags) {
  ENTER_CURRENT(cuMemAddressReserve);
  if (!len || len % GRANULARITY || align || at || flags) return unlock(INVALID_VALUE);
  u64 p = (u64)mmap(NULL, len + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if ((void *)p == MAP_FAILED) return unlock(OUT_OF_MEMORY);
  u64 start = (p + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (start > p) munmap((void *)p, start - p);
  if (p + GRANULARITY > start) munmap((void *)(start + len), p + GRANULARITY - start);
  struct object *o = add(RESERVATION);
  o->address = start;
  o->len = len;
  *address = start;
  return unlock(SUCCESS);
}
EXPORT int cuMemAddressFree(u64 address, size_t len) {
  ENTER_CURRENT(cuMemAddressFree);
  struct object *o = memory(address, RESERVATION, RESERVATION);
  if (!o || o->address != address || o->len != len || mapping(address)) return unlock(INVALID_VALUE);
  munmap((void *)address, len);
  o->kind = NOTHING;
  return unlock(SUCCESS);
}
EXPORT int cuMemCreate(u64 *handle, size_t len, const struct properties *p, u64 flags) {
  ENTER_CURRENT(cuMemCreate);
  if (bad_properties(p) || !len || len % GRANULARITY || flags) return unlock(INVALID_VALUE);
  if (p->handle_types & 8 && !fabric_allowed) return unlock(NOT_PERMITTED);
  if (len > 1ull << 40) return unlock(OUT_OF_MEMORY);
  struct object *o = add(PHYSICAL);
  o->len = len;
  o->device = p->location.id;
  o->handle_types = p->handle_types;
  o->fd = memfd_create("standin", MFD_CLOEXEC);
  if (o->fd < 0 || ftruncate(o->fd, (off_t)len)) abort();
  char dirt[4096]; // it is not zeroed
  memset(dirt, 0xa5, sizeof dirt);
  if (pwrite(o->fd, dirt, sizeof dirt, 0) != sizeof dirt) abort();
  *handle = (u64)(o - objects);
  return unlock(SUCCESS);
}
EXPORT int cuMemImportFromShareableHandle(u64 *handle, void *shareable, int type) {
  ENTER_CURRENT(cuMemImportFromShareableHandle);
  struct foreign f;
  struct stat stat;
  if (type != 1 && type != 8) return unlock(INVALID_VALUE);
  if (type == 8 && !fabric_allowed) return unlock(NOT_PERMITTED);
  if (type == 8) memcpy(&f, shareable, sizeof f);
  int fd = type == 1 ? fcntl((int)(u64)shareable, F_DUPFD_CLOEXEC, 0) : open_foreign(&f);
  if (fd < 0) return unlock(INVALID_VALUE);
  if (fstat(fd, &stat)) abort();
  struct object *o = add(PHYSICAL);
  o->len = (u64)stat.st_size;
  o->device = current()->device;
  o->fd = fd;
  *handle = (u64)(o - objects);
  return unlock(SUCCESS);
}
static void release(struct object *o) {
  if (!--o->shares) {
    close(o->fd);
    o->kind = NOTHING;
  }
}
EXPORT int cuMemRelease(u64 handle) {
  ENTER_CURRENT(cuMemRelease);
  struct object *o = physical(handle);
  if (!o) return unlock(INVALID_VALUE);
  release(o);
  return unlock(SUCCESS);
}
EXPORT int cuMemMap(u64 address, size_t len, size_t offset, u64 handle, u64 flags) {
  ENTER_CURRENT(cuMemMap);
  struct object *o = physical(handle);
  struct object *r = memory(address, RESERVATION, RESERVATION);
  if (!o || !r || offset || flags || len != o->len || len > r->address + r->len - address || mapping(address)) {
    return unlock(INVALID_VALUE);
  }
  void *p = mmap((void *)address, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, o->fd, 0);
  if (p == MAP_FAILED) abort();
  o->shares++;
  struct object *m = add(MAPPING);
  m->address = address;
  m->len = len;
  m->device = o->device;
  m->of = o;
  return unlock(SUCCESS);
}
EXPORT int cuMemUnmap(u64 address, size_t len) {
  ENTER_CURRENT(cuMemUnmap);
  struct object *m = mapping(address);
  if (!m || m->address != address || m->len != len) return unlock(INVALID_VALUE);
  if (mmap((void *)address, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) abort();
  release(m->of);
  m->kind = NOTHING;
  return unlock(SUCCESS);
}
EXPORT int cuMemSetAccess(u64 address, size_t len, const struct access *access, size_t count) {
  ENTER_CURRENT(cuMemSetAccess);
  if (!covered(address, len) || count != 1 || access->location.kind != 1 || access->flags != 3) {
    return unlock(INVALID_VALUE);
  }
  return unlock(SUCCESS);
}
EXPORT int cuMemRetainAllocationHandle(u64 *handle, void *address) {
  ENTER_CURRENT(cuMemRetainAllocationHandle);
  struct object *m = mapping((u64)address);
  if (!m) return unlock(INVALID_VALUE);
  m->of->shares++;
  *handle = (u64)(m->of - objects);
  return unlock(SUCCESS);
}
EXPORT int cuMemExportToShareableHandle(void *shareable, u64 handle, int type, u64 flags) {
  ENTER_CURRENT(cuMemExportToShareableHandle);
  struct object *o = physical(handle);
  if (!o || flags || !(o->handle_types & type)) return unlock(INVALID_VALUE);
  if (type == 1) {
    *(int *)shareable = dup(o->fd);
  } else {
    struct foreign f = {getpid(), o->fd, o->len, o->device};
    memset(shareable, 0, 64);
    memcpy(shareable, &f, sizeof f);
  }
  return unlock(SUCCESS);
}
// The descriptor is of the whole allocation; the real one begins at `address`. A test looks at numbers only.
EXPORT int cuMemGetHandleForAddressRange(void *handle, u64 address, size_t len, int type, u64 flags) {
  ENTER_CURRENT(cuMemGetHandleForAddressRange);
  u64 page = (u64)sysconf(_SC_PAGESIZE);
  struct object *o = device_memory(address);
  if (!o || !len || address % page || len % page || type != 1 || flags) return unlock(INVALID_VALUE);
  *(int *)handle = dup(o->kind == MAPPING ? o->of->fd : o->fd);
  return unlock(SUCCESS);
}
