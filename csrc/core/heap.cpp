#include "core/heap.h"

#include <cstdlib>  // says which C library it is
#include <string_view>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace pipetransformer::core {

namespace {

#ifdef __GLIBC__

// "No limit", as a number of bytes. Older versions refuse that for mappings,
// whose threshold is then the largest that they allow.
constexpr int kNoLimit = -1;
// Where glibc's own, which follow what is freed, end (mallopt(3)).
constexpr int kLargestMapped = 32 << 20;
constexpr int kLargestTrimmed = 2 * kLargestMapped;
// A thread's pool consists of parts of this size, which go as soon as they are
// empty unless so much is to stay free.
constexpr int kPoolPart = 64 << 20;
constexpr int kUsualPad = 128 << 10;

bool environment_decides() {
  for (const char* name :
       {"MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "MALLOC_TOP_PAD_",
        "MALLOC_MMAP_MAX_",
        "MALLOC_ARENA_MAX"}) {
    if (std::getenv(name) != nullptr) {
      return true;
    }
  }
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  return tunables != nullptr && std::string_view(tunables).find(
                                    "glibc.malloc.") != std::string_view::npos;
}

bool set_thresholds(int mapped, int trimmed, int pad) {
  const bool mapping = mallopt(M_MMAP_THRESHOLD, mapped) == 1 ||
                       mallopt(M_MMAP_THRESHOLD, kLargestMapped) == 1;
  return mapping && mallopt(M_TRIM_THRESHOLD, trimmed) == 1 &&
         mallopt(M_TOP_PAD, pad) == 1;
}

#endif

}  // namespace

bool keep_freed_memory() {
#ifdef __GLIBC__
  if (environment_decides()) {
    return false;
  }
  // Blocks that threads hand to each other come back to one pool, which may
  // grow; threads that have their own pool by now keep it.
  mallopt(M_ARENA_MAX, 1);
  return set_thresholds(kNoLimit, kNoLimit, kPoolPart);
#else
  return false;
#endif
}

void give_back_freed_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

void stop_keeping_freed_memory() {
#ifdef __GLIBC__
  if (!environment_decides()) {
    set_thresholds(kLargestMapped, kLargestTrimmed, kUsualPad);
    give_back_freed_memory();
  }
#endif
}

}  // namespace pipetransformer::core
