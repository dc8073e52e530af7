#include "core/protocol/request.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <functional>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "core/base/text.h"

namespace sirtaki::core {
namespace {

std::uint64_t Bits(double value) { return std::bit_cast<std::uint64_t>(value); }

// The shortest text that reads back as the same number, in any locale.
std::string Shortest(double value) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return {buffer, end};
}

class Hasher {
 public:
  void Mix(std::uint64_t value) {
    // splitmix64's finaliser: every bit of the input reaches every bit of the result.
    state_ += value + 0x9e3779b97f4a7c15U;
    state_ = (state_ ^ (state_ >> 30)) * 0xbf58476d1ce4e5b9U;
    state_ = (state_ ^ (state_ >> 27)) * 0x94d049bb133111ebU;
    state_ ^= state_ >> 31;
  }
  std::size_t Get() const { return static_cast<std::size_t>(state_); }

 private:
  std::uint64_t state_ = 0;
};

// The fields that are compared as they are; the factors are compared by their bits.
auto Tie(const Signature& s) {
  return std::tie(s.kind, s.reduction, s.dtype, s.wire, s.device, s.slot, s.root, s.shape, s.layout,
                  s.round);
}

bool SameParts(const Signature& a, const Signature& b) {
  return std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(),
                    [](const SignaturePtr& x, const SignaturePtr& y) { return *x == *y; });
}

// The text is what a signature of tensors says behind its kind.
std::string TensorText(const Signature& s) {
  std::string text;
  if (Reduces(s.kind)) text.append("(").append(ReduceOpName(s.reduction)).append(")");
  if (s.root >= 0) {
    text += s.kind == OpKind::kReduce || s.kind == OpKind::kGather ? " to rank " : " from rank ";
    text += std::to_string(s.root);
  }
  text.append(" of ").append(DTypeName(s.dtype)).append(" ");
  text += ShapeText(s.shape, FirstDimensionVaries(s.kind));
  if (s.wire) text.append(" as ").append(DTypeName(*s.wire));
  if (s.device == DeviceKind::kCuda) text += " on CUDA device slot " + std::to_string(s.slot);
  if (Bits(s.prescale) != Bits(1.0)) text += ", prescale " + Shortest(s.prescale);
  if (Bits(s.postscale) != Bits(1.0)) text += ", postscale " + Shortest(s.postscale);
  if (s.layout != 0) {
    char buffer[17];
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), s.layout, 16).ptr;
    text += ", bucket layout " + std::string(buffer, end);
  }
  return text;
}

// The words say what a call of the library itself is for; empty if the name is a program's. Such a
// name is words behind '#', which no program may give, or behind "sirtaki/" if it goes through the
// public interface; there what tells the parts of a call apart follows after another '/'.
std::string_view WordsOf(std::string_view name) {
  constexpr std::string_view kPublic = "sirtaki/";
  if (name.starts_with('#')) return name.substr(1);
  if (!name.starts_with(kPublic)) return {};
  name.remove_prefix(kPublic.size());
  return name.substr(0, name.find('/'));
}

}  // namespace

Name::Name(std::string text) {
  if (text.empty()) return;
  const std::size_t hash = std::hash<std::string>{}(text);
  const bool plain = WordsOf(text).empty() && std::all_of(text.begin(), text.end(), [](char c) {
                       return c >= ' ' && c < '\x7f' && c != '"' && c != '\\';
                     });
  shared_ = std::make_shared<const Shared>(Shared{std::move(text), hash, plain});
}

const std::string& Name::Nothing() {
  static const std::string& nothing = *new std::string();  // not destroyed, as the ok Status
  return nothing;
}

std::string Key::ToString() const {
  std::string text;
  switch (form) {
    case Form::kNamed:
      text = WordsOf(name.text()).empty() ? Quoted(name.text()) : Escaped(WordsOf(name.text()));
      break;
    case Form::kUnnamed:
      if (is_join()) {
        text = "join";
        break;
      }
      text = "unnamed call #" + std::to_string(number);
      break;
    case Form::kBucket:
      text =
          "bucket " + std::to_string(bucket) + " of arena " + std::to_string(number & 0xffffffff);
      if (number >> 32 != 0) {
        text += ", layout " + std::to_string((number >> 32 & 0xffff) + 1);
        if (const std::uint64_t joins = number >> 48; joins > 0) {
          text += " since join " + std::to_string(joins);
        }
      }
      break;
  }
  if (set != kWorldSet) text += " of process set " + std::to_string(set);
  return text;
}

std::size_t KeyHash::OfNumbers(const Key& key) {
  Hasher hasher;
  hasher.Mix((std::uint64_t{key.set} << 8) | static_cast<std::uint64_t>(key.form));
  hasher.Mix(key.number);
  hasher.Mix(key.bucket);
  return hasher.Get();
}

std::int64_t Signature::Bytes() const {
  std::int64_t bytes = 0;
  return __builtin_mul_overflow(ElementCount(), BytesOf(dtype), &bytes)
             ? std::numeric_limits<std::int64_t>::max()
             : bytes;
}

std::int64_t Signature::ElementCount() const {
  // Saturates: a shape may come from another process, and a wrapped product would be a small
  // buffer.
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  std::int64_t count = 1;
  for (std::int64_t dimension : shape) {
    if (dimension <= 0) return 0;
    count = dimension > kMax / count ? kMax : count * dimension;
  }
  return count;
}

std::string Signature::ToString() const {
  std::string text(OpKindName(kind));
  if (kind == OpKind::kBarrier) return text;
  if (kind == OpKind::kMakeArena) return text + " on CUDA device slot " + std::to_string(slot);
  if (parts.empty()) return text + TensorText(*this);
  constexpr std::size_t kShown = 4;
  text += " of " + std::to_string(parts.size()) + " tensors:";
  for (std::size_t i = 0; i < parts.size() && i < kShown; ++i) {
    const std::string part = TensorText(*parts[i]);
    text += (i == 0 ? "" : ";") + std::string(part.starts_with(' ') ? "" : " ") + part;
  }
  return parts.size() > kShown ? text + "; …" : text;
}

bool Signature::operator==(const Signature& other) const {
  return Tie(*this) == Tie(other) && Bits(prescale) == Bits(other.prescale) &&
         Bits(postscale) == Bits(other.postscale) && SameParts(*this, other);
}

std::size_t SignatureHash::operator()(const Signature& signature) const noexcept {
  Hasher hasher;
  hasher.Mix(static_cast<std::uint64_t>(signature.kind) |
             static_cast<std::uint64_t>(signature.reduction) << 8 |
             static_cast<std::uint64_t>(signature.dtype) << 16 |
             static_cast<std::uint64_t>(signature.device) << 24 |
             std::uint64_t{signature.slot} << 32);
  hasher.Mix(static_cast<std::uint64_t>(signature.root));
  for (std::int64_t dimension : signature.shape) {
    hasher.Mix(static_cast<std::uint64_t>(dimension));
  }
  hasher.Mix(Bits(signature.prescale));
  hasher.Mix(Bits(signature.postscale));
  hasher.Mix(signature.layout);
  if (signature.wire) hasher.Mix(static_cast<std::uint64_t>(*signature.wire));
  for (const SignaturePtr& part : signature.parts) hasher.Mix((*this)(*part));
  hasher.Mix(signature.round);
  return hasher.Get();
}

bool AskTheSame(const Asked& a, const Asked& b) {
  const SignaturePtr& one = CollectiveOf(a);
  const SignaturePtr& other = CollectiveOf(b);
  if (one == nullptr || other == nullptr) return a == b;
  return one == other || *one == *other;
}

bool AllAbsent(const std::vector<bool>& absent) {
  return !absent.empty() && std::find(absent.begin(), absent.end(), false) == absent.end();
}

std::string_view KindName(const Asked& asked) {
  if (const SignaturePtr& signature = CollectiveOf(asked)) return OpKindName(signature->kind);
  constexpr std::array<std::string_view, std::variant_size_v<Asked>> kNames = {
      "nothing", "adding a process set", "removing a process set", "change of limits", "assembly",
      "refusal"};
  return kNames[asked.index()];
}

std::string DetailText(const Asked& asked) {
  if (const auto* added = std::get_if<AddSet>(&asked)) return "ranks " + added->members.ToString();
  if (const auto* removed = std::get_if<RemoveSet>(&asked)) {
    return "the number " + std::to_string(removed->set);
  }
  std::string text;
  if (const auto* limits = std::get_if<Limits>(&asked)) {
    Limits::ForEach(*limits, [&text](const char* name, std::int64_t value) {
      text.append(text.empty() ? "" : " ").append(name).append(" ").append(std::to_string(value));
    });
  }
  return text;
}

std::string AskedText(const Asked& asked) {
  if (const SignaturePtr& signature = CollectiveOf(asked)) return signature->ToString();
  const std::string detail = DetailText(asked);
  return std::string(KindName(asked)) + (detail.empty() ? "" : " of ") + detail;
}

}  // namespace sirtaki::core
