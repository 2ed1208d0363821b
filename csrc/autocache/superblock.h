// What the superblocks of shared memory have in common: the run that they
// belong to, and how a process that attaches copies them before it checks them.
// Torch-free, thread-safe (no state).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pipetransformer::autocache {

inline constexpr std::size_t kMaxRunIdBytes = 256;  // with the closing zero

// Throws std::invalid_argument "<what>: expected <expected>, got <actual>".
[[noreturn]] void refuse(
    const std::string& what,
    const std::string& expected,
    const std::string& actual);

// Writes `run_id` to a superblock of zeros. Throws std::invalid_argument unless
// it has 1 to 255 bytes.
void put_run_id(const std::string& run_id, char (&to)[kMaxRunIdBytes]);

// Throws std::invalid_argument unless `found`, which may hold anything, is
// `run_id`.
void require_run_id(const std::string& run_id, char (&found)[kMaxRunIdBytes]);

// Copies words of shared memory, each once: what is checked in the copy is what
// is used. `bytes` are whole words.
void copy_words(void* to, std::byte* from, std::size_t bytes) noexcept;

}  // namespace pipetransformer::autocache
