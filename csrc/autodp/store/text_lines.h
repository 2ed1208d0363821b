// Messages of lines: how keys with several fields are written and read.
// Torch-free.
#pragma once

#include <charconv>
#include <string>
#include <string_view>
#include <vector>

namespace pipetransformer::autodp {

// Cuts the first line off `rest` and returns it without its end.
inline std::string_view take_line(std::string_view& rest) {
  const auto end = rest.find('\n');
  const auto line = rest.substr(0, end);
  rest =
      end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return line;
}

// False, with `number` unchanged, unless all of `text` is one number.
template <typename Number>
bool parse(std::string_view text, Number& number) {
  Number value{};
  const auto* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end) {
    return false;
  }
  number = value;
  return true;
}

template <typename Numbers>
std::string join_numbers(const Numbers& numbers, const char* separator = ",") {
  std::string text;
  for (const int number : numbers) {
    text += (text.empty() ? "" : separator) + std::to_string(number);
  }
  return text;
}

// The reverse; the empty text is no number at all.
inline bool parse_numbers(
    std::string_view text,
    std::vector<int>& numbers,
    char separator = ',') {
  numbers.clear();
  while (!text.empty()) {
    const auto end = text.find(separator);
    if (!parse(text.substr(0, end), numbers.emplace_back())) {
      return false;
    }
    text = end == std::string_view::npos ? std::string_view()
                                         : text.substr(end + 1);
  }
  return true;
}

}  // namespace pipetransformer::autodp
