// Bytes from elsewhere as text that a terminal may show. Torch-free.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace pipetransformer::core {

// Letters of a sentence that is quoted, in bytes.
inline constexpr size_t kLongestText = 4096;

// Valid UTF-8 of at most `longest` bytes, and "..." where that cuts it. Control
// characters (of terminals and of writing direction) become spaces, bytes that
// are no UTF-8 become U+FFFD.
std::string plain_text(std::string_view bytes, size_t longest = kLongestText);

}  // namespace pipetransformer::core
