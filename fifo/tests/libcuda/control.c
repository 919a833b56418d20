// How a test steers the stand-in and looks into it. Part of the stand-in, see calls.c.

// How often a function was called (null: any function) by a thread (its id in the system; 0: any thread).
EXPORT long standin_calls(const char *name, long id) {
  long sum = 0;
  lock();
  for (int t = 0; t < MAX_THREADS && threads[t].id; t++) {
    if (id && threads[t].id != id) continue;
    for (int f = 0; f < MAX_FUNCTIONS && functions[f].name; f++) {
      if (!name || !strcmp(functions[f].name, name)) sum += threads[t].calls[f];
    }
  }
  unlock(0);
  return sum;
}
// Makes `count` calls of a function fail with `status`, from the `nth` on, counted from 1 and from now.
EXPORT void standin_fail(const char *name, long nth, long count, int status) {
  lock();
  struct function *f = &functions[function(strdup(name))];
  f->fail_from = f->calls + nth;
  f->fail_to = f->fail_from + count;
  f->status = status;
  unlock(0);
}
// Holds the calls of a function until it is released.
EXPORT void standin_hold(const char *name, int held) {
  lock();
  functions[function(strdup(name))].held = held;
  pthread_cond_broadcast(&changed);
  unlock(0);
}
// How many calls of a function are held just now.
EXPORT long standin_waiting(const char *name) {
  lock();
  long waiting = functions[function(strdup(name))].waiting;
  unlock(0);
  return waiting;
}
EXPORT void standin_set(const char *what, long value) {
  lock();
  if (!strcmp(what, "devices")) devices = (int)value;
  else if (!strcmp(what, "loading mode")) loading_mode = (int)value;
  else if (!strcmp(what, "pinned shift")) pinned_shift = (u64)value;
  else if (!strcmp(what, "fabric allowed")) fabric_allowed = (int)value;
  else if (!strcmp(what, "strict")) strict = (int)value;
  else if (!strcmp(what, "opens its own")) opens_own = (int)value;
  else if (!strcmp(what, "peer access")) peer_access = (int)value;
  else if (!strcmp(what, "uuid base")) uuid_base = (int)value;
  else if (!strcmp(what, "paused")) pause_streams((int)value);
  else abort();
  unlock(0);
}
// Sets a device attribute; -1: the driver does not know it.
EXPORT void standin_set_attribute(int attribute, int value) {
  lock();
  attributes[attribute] = value;
  unlock(0);
}
// How many objects there are that somebody has to give back.
EXPORT long standin_live(void) {
  long live = 0;
  lock();
  for (int i = 1; i < MAX_OBJECTS; i++) live += objects[i].kind != NOTHING && objects[i].kind != KERNEL;
  unlock(0);
  return live;
}
// This thread's stream capture mode, and how many contexts it has pushed.
EXPORT int standin_mode(void) { return mode; }
EXPORT int standin_depth(void) { return depth; }
EXPORT void standin_set_mode(int value) { mode = value; }
