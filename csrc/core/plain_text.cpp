#include "core/plain_text.h"

#include <cstdint>
#include <optional>

namespace pipetransformer::core {

namespace {

struct Letter {
  uint32_t code = 0;
  size_t size = 0;  // in bytes
};

// The letter that `bytes` begin with; nullopt if they begin with none (Unicode
// 15, table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF).
std::optional<Letter> first_letter(std::string_view bytes) {
  const auto at = [&bytes](size_t i) {
    return static_cast<unsigned char>(bytes[i]);
  };
  const uint32_t lead = at(0);
  if (lead < 0x80) {
    return Letter{lead, 1};
  }
  const size_t size = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || bytes.size() < size) {
    return std::nullopt;
  }
  uint32_t code = lead & (0xffU >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if ((at(i) & 0xc0U) != 0x80) {
      return std::nullopt;
    }
    code = code << 6 | (at(i) & 0x3fU);
  }
  const bool overlong =
      (size == 3 && code < 0x800) || (size == 4 && code < 0x10000);
  if (overlong || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) {
    return std::nullopt;
  }
  return Letter{code, size};
}

bool is_control(uint32_t code) {
  const auto within = [code](uint32_t low, uint32_t high) {
    return low <= code && code <= high;
  };
  return code < 0x20 || within(0x7f, 0x9f) || code == 0x61c ||
         within(0x200e, 0x200f) || within(0x2028, 0x202e) ||
         within(0x2066, 0x2069);
}

}  // namespace

std::string plain_text(std::string_view bytes, size_t longest) {
  std::string text;
  while (!bytes.empty()) {
    std::string_view next;
    size_t taken = 1;
    if (const auto letter = first_letter(bytes)) {
      taken = letter->size;
      next = is_control(letter->code) ? " " : bytes.substr(0, taken);
    } else {
      next = "\xef\xbf\xbd";
    }
    if (text.size() + next.size() > longest) {
      return text + "...";
    }
    text += next;
    bytes.remove_prefix(taken);
  }
  return text;
}

}  // namespace pipetransformer::core
