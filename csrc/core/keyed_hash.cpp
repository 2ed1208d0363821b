#include "core/keyed_hash.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace pipetransformer::core {

namespace {

constexpr std::array<uint32_t, 64> kRounds{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const uint8_t* p) noexcept {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 |
         uint32_t{p[3]};
}

template <typename Word>
void store_big_endian(Word value, uint8_t* p) noexcept {
  for (size_t i = 0; i < sizeof(Word); ++i) {
    p[i] = static_cast<uint8_t>(value >> (8 * (sizeof(Word) - 1 - i)));
  }
}

}  // namespace

void Sha256::take_block(const uint8_t* block) noexcept {
  std::array<uint32_t, 64> w{};
  for (size_t t = 0; t < 16; ++t) {
    w[t] = load_big_endian(block + 4 * t);
  }
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t x = w[t - 15];
    const uint32_t y = w[t - 2];
    w[t] = w[t - 16] + (std::rotr(x, 7) ^ std::rotr(x, 18) ^ (x >> 3)) +
           w[t - 7] + (std::rotr(y, 17) ^ std::rotr(y, 19) ^ (y >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t first =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
        ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
        ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const std::array<uint32_t, 8> added{a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state_.size(); ++i) {
    state_[i] += added[i];
  }
}

void Sha256::update(std::string_view bytes) noexcept {
  const auto* p = reinterpret_cast<const uint8_t*>(bytes.data());
  size_t left = bytes.size();
  size_ += left;
  while (left > 0) {
    if (filled_ == 0 && left >= block_.size()) {
      take_block(p);
      p += block_.size();
      left -= block_.size();
      continue;
    }
    const size_t count = std::min(left, block_.size() - filled_);
    std::memcpy(block_.data() + filled_, p, count);
    p += count;
    left -= count;
    filled_ += count;
    if (filled_ == block_.size()) {
      take_block(block_.data());
      filled_ = 0;
    }
  }
}

Digest Sha256::finish() noexcept {
  const uint64_t bits = 8 * size_;
  block_[filled_++] = 0x80;
  if (filled_ > block_.size() - sizeof(bits)) {
    std::fill(block_.begin() + filled_, block_.end(), uint8_t{0});
    take_block(block_.data());
    filled_ = 0;
  }
  std::fill(block_.begin() + filled_, block_.end(), uint8_t{0});
  store_big_endian(bits, block_.data() + block_.size() - sizeof(bits));
  take_block(block_.data());
  Digest digest{};
  for (size_t i = 0; i < state_.size(); ++i) {
    store_big_endian(state_[i], digest.data() + 4 * i);
  }
  return digest;
}

KeyedHash::KeyedHash(std::string_view key) {
  std::array<char, 64> padded{};
  if (key.size() > padded.size()) {
    Sha256 shortened;
    shortened.update(key);
    const auto digest = shortened.finish();
    std::memcpy(padded.data(), digest.data(), digest.size());
  } else {
    std::copy(key.begin(), key.end(), padded.begin());
  }
  const auto start = [&padded](Sha256& hash, char pad) {
    auto block = padded;
    for (char& c : block) {
      c = static_cast<char>(c ^ pad);
    }
    hash.update({block.data(), block.size()});
  };
  start(inner_, 0x36);
  start(outer_, 0x5c);
}

Digest KeyedHash::operator()(
    std::initializer_list<std::string_view> parts) const noexcept {
  auto inner = inner_;
  for (const auto part : parts) {
    inner.update(part);
  }
  const auto digest = inner.finish();
  auto outer = outer_;
  outer.update(as_text(digest));
  return outer.finish();
}

bool same_bytes(std::string_view a, std::string_view b) noexcept {
  if (a.size() != b.size()) {
    return false;
  }
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |=
        static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

}  // namespace pipetransformer::core
