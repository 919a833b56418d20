// What the driver hands out: contexts, streams, memory. Part of the stand-in, see calls.c.

enum kind {
  NOTHING, CONTEXT, STREAM, MODULE, KERNEL, EVENT,
  HOST, REGISTERED,     // page-locked memory
  LEGACY, OPENED, POOL, // device memory in one piece
  RESERVATION, MAPPING, PHYSICAL
};

// A handle is the address of its object, a physical allocation's its number.
static struct object {
  enum kind kind;
  u64 address, len; // memory
  int device;
  int fd;           // of memory: what is mapped
  int handle_types; // PHYSICAL
  long shares;      // PHYSICAL, CONTEXT
  struct object *of;
  struct work *first, *last; // STREAM: what it has not done yet
} objects[MAX_OBJECTS];

static struct object *add(enum kind kind) {
  for (int i = 1; i < MAX_OBJECTS; i++) {
    if (objects[i].kind == NOTHING) {
      objects[i] = (struct object){.kind = kind, .fd = -1, .shares = 1};
      return &objects[i];
    }
  }
  abort();
}

static struct object *as(void *handle, enum kind kind) {
  struct object *o = handle;
  return o > objects && o < objects + MAX_OBJECTS && o->kind == kind ? o : NULL;
}

static struct object *physical(u64 handle) {
  return handle < MAX_OBJECTS ? as(&objects[handle], PHYSICAL) : NULL;
}

// The memory of a kind from `first` to `last` that an address lies in.
static struct object *memory(u64 address, enum kind first, enum kind last) {
  for (int i = 1; i < MAX_OBJECTS; i++) {
    struct object *o = &objects[i];
    if (o->kind >= first && o->kind <= last && address >= o->address && address - o->address < o->len) return o;
  }
  return NULL;
}

static struct object *host_memory(u64 address) { return memory(address, HOST, REGISTERED); }

static struct object *mapping(u64 address) { return memory(address, MAPPING, MAPPING); }

static struct object *device_memory(u64 address) {
  struct object *m = mapping(address);
  return m ? m : memory(address, LEGACY, POOL);
}

// Whether every byte is the device's; neighbouring mappings count as one range.
static int covered(u64 address, u64 len) {
  while (len) {
    struct object *o = device_memory(address);
    if (!o) return 0;
    u64 here = o->address + o->len - address;
    if (here >= len) return 1;
    address += here;
    len -= here;
  }
  return 1;
}

// Whether a copy or a written value may touch these bytes.
static int reachable(u64 address, u64 len) {
  struct object *o = host_memory(address);
  return o ? len <= o->address + o->len - address : covered(address, len);
}

// What a handle that goes to other processes says: whose descriptor it is, of which length.
struct foreign {
  int pid, fd;
  u64 len;
  int device;
};

// The descriptor behind such a handle, or -1: found in /proc, so it must still be open over there.
static int open_foreign(const struct foreign *f) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", f->pid, f->fd);
  return open(path, O_RDWR | O_CLOEXEC);
}

// The length in pages, and one more that belongs to nobody, so that no two allocations touch.
static u64 page_up(u64 len) {
  u64 page = (u64)sysconf(_SC_PAGESIZE);
  return (len + page - 1) / page * page + page;
}

// Memory of a kind, with a descriptor behind it. Not zeroed, as the driver's is not.
static struct object *allocate(enum kind kind, u64 len) {
  int fd = memfd_create("standin", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)page_up(len))) abort();
  void *p = mmap(NULL, page_up(len), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) abort();
  memset(p, 0xa5, len);
  struct object *o = add(kind);
  o->address = (u64)p;
  o->len = len;
  o->fd = fd;
  return o;
}

static void deallocate(struct object *o) {
  munmap((void *)o->address, page_up(o->len));
  close(o->fd);
  o->kind = NOTHING;
}
