#include "autocache/superblock.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string_view>

namespace pipetransformer::autocache {

namespace {

// `text` as far as it may stand in a message: memory of others may hold
// escapes.
std::string printable(std::string_view text) {
  const bool plain = std::all_of(text.begin(), text.end(), [](char letter) {
    return letter >= ' ' && letter <= '~';
  });
  return plain ? "'" + std::string(text) + "'" : "one that is not plain text";
}

}  // namespace

void refuse(
    const std::string& what,
    const std::string& expected,
    const std::string& actual) {
  throw std::invalid_argument(
      what + ": expected " + expected + ", got " + actual);
}

void put_run_id(const std::string& run_id, char (&to)[kMaxRunIdBytes]) {
  if (run_id.empty() || run_id.size() >= kMaxRunIdBytes) {
    refuse(
        "run_id", "1 to 255 bytes", std::to_string(run_id.size()) + " bytes");
  }
  run_id.copy(to, kMaxRunIdBytes - 1);
}

void require_run_id(const std::string& run_id, char (&found)[kMaxRunIdBytes]) {
  found[kMaxRunIdBytes - 1] = '\0';
  if (run_id != found) {
    refuse("run_id", printable(run_id), printable(found));
  }
}

void copy_words(void* to, std::byte* from, std::size_t bytes) noexcept {
  auto* words = reinterpret_cast<uint64_t*>(from);
  for (std::size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word =
        std::atomic_ref<uint64_t>(*words++).load(std::memory_order_relaxed);
    std::memcpy(static_cast<std::byte*>(to) + at, &word, sizeof(word));
  }
}

}  // namespace pipetransformer::autocache
