/* Makes files without a name fail or slow down, for LD_PRELOAD: reads and writes
 * at a place of regular files with no link. Linux. See disk_faults.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_int read_error, write_error, read_ms;
static atomic_long read_rate;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

/* What reads and writes report, 0: nothing; how long each read
 * takes at least, also those that have begun. */
void disk_faults_set(int of_reads, int of_writes, int milliseconds) {
  read_error = of_reads;
  write_error = of_writes;
  read_ms = milliseconds;
}

/* Reads of all threads together move that many bytes a second; 0: any number. */
void disk_faults_limit(long bytes_per_s) {
  read_rate = bytes_per_s;
}

static void keep_to_rate(size_t size) {
  const long rate = read_rate;
  if (rate > 0) {
    pthread_mutex_lock(&one_at_a_time);
    usleep((useconds_t)(1e6 * (double)size / (double)rate));
    pthread_mutex_unlock(&one_at_a_time);
  }
}

static int counts(int descriptor) {
  struct stat info;
  return fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode) &&
      info.st_nlink == 0;
}

static int fails(atomic_int* error) {
  errno = *error;
  return errno != 0;
}

#define REAL(name, type)                       \
  static __typeof__(type) real = NULL;         \
  if (real == NULL) {                          \
    *(void**)(&real) = dlsym(RTLD_NEXT, name); \
  }                                            \
  if (real == NULL) {                          \
    abort();                                   \
  }

#define READ(function, place)                                       \
  ssize_t function(int file, void* data, size_t size, place at) {   \
    REAL(#function, ssize_t (*)(int, void*, size_t, place))         \
    if (counts(file)) {                                             \
      for (int ms = 0; ms < read_ms; ms += 10) {                    \
        usleep(10000);                                              \
      }                                                             \
      keep_to_rate(size);                                           \
      if (fails(&read_error)) {                                     \
        return -1;                                                  \
      }                                                             \
    }                                                               \
    return real(file, data, size, at);                              \
  }

#define WRITE(function, place)                                          \
  ssize_t function(int file, const void* data, size_t size, place at) { \
    REAL(#function, ssize_t (*)(int, const void*, size_t, place))       \
    return counts(file) && fails(&write_error) ? -1                     \
                                               : real(file, data, size, at); \
  }

READ(pread, off_t)
READ(pread64, off64_t)
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)
