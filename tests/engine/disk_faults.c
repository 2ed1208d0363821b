/* Makes the disk below one folder fail at a chosen operation; for LD_PRELOAD.
 *
 * Operations on the folder, on what is below it, and on descriptors and listings
 * that were opened there are counted from 1 on. The armed one fails, or does what
 * else a bad disk does. Linux, one thread that uses the folder. See disk_faults.py.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { FAIL = 1, SHORT = 2, LIE = 3, SLOW = 4, DEAD = 5 };
enum { READ = 1, WRITE = 2, OTHER = 4 };
enum { MOST_FILES = 4096, MOST_FOLDERS = 16, SLOW_US = 500 };

static char folder[PATH_MAX];
static size_t folder_length;
static unsigned char files[MOST_FILES]; /* by descriptor: whether it counts */
static DIR* folders[MOST_FOLDERS];

static long number, at; /* of operations; at 0: none */
static int kind, code, kinds_of_operation;
static const char* struck = "";

/* Count what is below `path` from now on; nothing fails. */
void disk_faults_watch(const char* path) {
  folder_length = strlen(path);
  memcpy(folder, path, folder_length + 1);
  at = 0;
}

/* Let operation `which` of the given kinds (bits) fail in some way; 0: none. DEAD:
 * all that follow it, too. */
void disk_faults_arm(long which, int operations, int way, int error) {
  number = 0;
  struck = "";
  kinds_of_operation = operations;
  kind = way;
  code = error;
  at = which;
}

/* Disarm; return the name of the operation that was struck, "" if none was. */
const char* disk_faults_disarm(void) {
  at = 0;
  return struck;
}

/* Return in which way this operation is to fail, 0 if in none; never DEAD. */
static int strikes(const char* name, int operation) {
  if (at == 0 || (operation & kinds_of_operation) == 0) {
    return 0;
  }
  if (kind == SLOW) {
    struck = name;
    usleep(SLOW_US);
    return 0;
  }
  ++number;
  if (number > at && kind == DEAD) {
    return FAIL;
  }
  if (number != at) {
    return 0;
  }
  struck = name;
  return kind == DEAD ? FAIL : kind;
}

static int is_below(const char* path) {
  return path != NULL && folder_length > 0 &&
      strncmp(path, folder, folder_length) == 0 &&
      (path[folder_length] == '/' || path[folder_length] == '\0');
}

static int is_file(int descriptor) {
  return descriptor >= 0 && descriptor < MOST_FILES && files[descriptor];
}

static int fail(void) {
  errno = code;
  return -1;
}

/* Only functions of this C library are called, so none of them is missing. */
#define REAL(name, type)                      \
  static __typeof__(type) real = NULL;        \
  if (real == NULL) {                         \
    *(void**)(&real) = dlsym(RTLD_NEXT, name); \
  }                                           \
  if (real == NULL) {                         \
    abort();                                  \
  }

/* -- opening and closing --------------------------------------------------- */

static int note(int descriptor) {
  if (descriptor >= 0 && descriptor < MOST_FILES) {
    files[descriptor] = 1;
  }
  return descriptor;
}

#define OPEN(function)                                      \
  int function(const char* path, int flags, ...) {          \
    REAL(#function, int (*)(const char*, int, ...))         \
    mode_t mode = 0;                                        \
    if ((flags & (O_CREAT | O_TMPFILE)) != 0) {             \
      va_list rest;                                         \
      va_start(rest, flags);                                \
      mode = va_arg(rest, mode_t);                          \
      va_end(rest);                                         \
    }                                                       \
    if (!is_below(path)) {                                  \
      return real(path, flags, mode);                       \
    }                                                       \
    return strikes("open", OTHER) == FAIL                   \
        ? fail()                                            \
        : note(real(path, flags, mode));                    \
  }

OPEN(open)
OPEN(open64)

int close(int descriptor) {
  REAL("close", int (*)(int))
  const int counts = is_file(descriptor);
  if (counts) {
    files[descriptor] = 0;
  }
  const int done = real(descriptor);
  return counts && strikes("close", OTHER) == FAIL ? fail() : done;
}

/* -- reading and writing --------------------------------------------------- */

ssize_t read(int descriptor, void* buffer, size_t size) {
  REAL("read", ssize_t (*)(int, void*, size_t))
  const int way = is_file(descriptor) ? strikes("read", READ) : 0;
  if (way == FAIL) {
    return fail();
  }
  if (way == SHORT && size > 1) {
    size /= 2;
  }
  const ssize_t done = real(descriptor, buffer, size);
  if (way == LIE && done > 0) {
    ((unsigned char*)buffer)[done / 2] ^= 0x10;
  }
  return done;
}

ssize_t write(int descriptor, const void* buffer, size_t size) {
  REAL("write", ssize_t (*)(int, const void*, size_t))
  const int way = is_file(descriptor) ? strikes("write", WRITE) : 0;
  if (way == FAIL) {
    return fail();
  }
  if (way == SHORT && size > 1) {
    size /= 2;
  }
  if (way == LIE && size > 0) {
    unsigned char* other = malloc(size);
    if (other == NULL) {
      return fail();
    }
    memcpy(other, buffer, size);
    other[size / 2] ^= 0x10;
    const ssize_t done = real(descriptor, other, size);
    free(other);
    return done;
  }
  return real(descriptor, buffer, size);
}

int fsync(int descriptor) {
  REAL("fsync", int (*)(int))
  const int counts = is_file(descriptor);
  return counts && strikes("fsync", WRITE) == FAIL ? fail() : real(descriptor);
}

/* -- names ----------------------------------------------------------------- */

int rename(const char* from, const char* to) {
  REAL("rename", int (*)(const char*, const char*))
  const int fails = is_below(to) && strikes("rename", OTHER) == FAIL;
  return fails ? fail() : real(from, to);
}

int link(const char* from, const char* to) {
  REAL("link", int (*)(const char*, const char*))
  const int fails = is_below(to) && strikes("link", OTHER) == FAIL;
  return fails ? fail() : real(from, to);
}

int unlink(const char* path) {
  REAL("unlink", int (*)(const char*))
  const int fails = is_below(path) && strikes("unlink", OTHER) == FAIL;
  return fails ? fail() : real(path);
}

int mkdir(const char* path, mode_t mode) {
  REAL("mkdir", int (*)(const char*, mode_t))
  const int fails = is_below(path) && strikes("mkdir", OTHER) == FAIL;
  return fails ? fail() : real(path, mode);
}

/* -- of a file that is open ------------------------------------------------ */

int futimens(int descriptor, const struct timespec times[2]) {
  REAL("futimens", int (*)(int, const struct timespec*))
  const int fails = is_file(descriptor) && strikes("utime", OTHER) == FAIL;
  return fails ? fail() : real(descriptor, times);
}

int flock(int descriptor, int operation) {
  REAL("flock", int (*)(int, int))
  const int fails = is_file(descriptor) && strikes("flock", OTHER) == FAIL;
  return fails ? fail() : real(descriptor, operation);
}

/* To the end alone: for that, a server of files is asked. */
#define SEEK(function, offset_type)                                       \
  offset_type function(int descriptor, offset_type offset, int whence) {  \
    REAL(#function, offset_type (*)(int, offset_type, int))               \
    const int counts = is_file(descriptor) && whence == SEEK_END;         \
    return counts && strikes("lseek", OTHER) == FAIL                      \
        ? fail()                                                          \
        : real(descriptor, offset, whence);                               \
  }

SEEK(lseek, off_t)
SEEK(lseek64, off64_t)

/* -- looking, by the names that the C library has had for it --------------- */

#define LOOK(function, told, info)                             \
  int function(const char* path, struct info* found) {         \
    REAL(#function, int (*)(const char*, struct info*))        \
    const int fails = is_below(path) && strikes(told, OTHER) == FAIL; \
    return fails ? fail() : real(path, found);                 \
  }
#define OLD_LOOK(function, told, info)                         \
  int function(int version, const char* path, struct info* found) { \
    REAL(#function, int (*)(int, const char*, struct info*))   \
    const int fails = is_below(path) && strikes(told, OTHER) == FAIL; \
    return fails ? fail() : real(version, path, found);        \
  }

#define LOOK_AT_OPEN(function, info)                                       \
  int function(int descriptor, struct info* found) {                      \
    REAL(#function, int (*)(int, struct info*))                           \
    const int fails = is_file(descriptor) && strikes("fstat", OTHER) == FAIL; \
    return fails ? fail() : real(descriptor, found);                      \
  }
#define OLD_LOOK_AT_OPEN(function, info)                                   \
  int function(int version, int descriptor, struct info* found) {         \
    REAL(#function, int (*)(int, int, struct info*))                      \
    const int fails = is_file(descriptor) && strikes("fstat", OTHER) == FAIL; \
    return fails ? fail() : real(version, descriptor, found);             \
  }

int __fxstat(int, int, struct stat*);
int __fxstat64(int, int, struct stat64*);
int __xstat(int, const char*, struct stat*);
int __xstat64(int, const char*, struct stat64*);
int __lxstat(int, const char*, struct stat*);
int __lxstat64(int, const char*, struct stat64*);

LOOK(stat, "stat", stat)
LOOK(stat64, "stat", stat64)
LOOK(lstat, "lstat", stat)
LOOK(lstat64, "lstat", stat64)
OLD_LOOK(__xstat, "stat", stat)
OLD_LOOK(__xstat64, "stat", stat64)
OLD_LOOK(__lxstat, "lstat", stat)
OLD_LOOK(__lxstat64, "lstat", stat64)
LOOK_AT_OPEN(fstat, stat)
LOOK_AT_OPEN(fstat64, stat64)
OLD_LOOK_AT_OPEN(__fxstat, stat)
OLD_LOOK_AT_OPEN(__fxstat64, stat64)

/* -- listings -------------------------------------------------------------- */

static DIR** place_of(const DIR* listing) {
  for (int i = 0; i < MOST_FOLDERS; ++i) {
    if (folders[i] == listing) {
      return &folders[i];
    }
  }
  return NULL;
}

DIR* opendir(const char* path) {
  REAL("opendir", DIR * (*)(const char*))
  if (!is_below(path)) {
    return real(path);
  }
  if (strikes("opendir", OTHER) == FAIL) {
    errno = code;
    return NULL;
  }
  DIR* listing = real(path);
  DIR** place = place_of(NULL);
  if (listing != NULL && place != NULL) {
    *place = listing;
  }
  return listing;
}

int closedir(DIR* listing) {
  REAL("closedir", int (*)(DIR*))
  DIR** place = place_of(listing);
  if (place != NULL) {
    *place = NULL;
  }
  return real(listing);
}

#define NEXT(function, entry)                                  \
  struct entry* function(DIR* listing) {                       \
    REAL(#function, struct entry * (*)(DIR*))                  \
    if (place_of(listing) != NULL && strikes("readdir", OTHER) == FAIL) { \
      errno = code;                                            \
      return NULL;                                             \
    }                                                          \
    return real(listing);                                      \
  }

NEXT(readdir, dirent)
NEXT(readdir64, dirent64)
