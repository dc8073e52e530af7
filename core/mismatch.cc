#include "core/mismatch.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <sstream>

namespace sirtaki::core {
namespace {

std::string ShapeText(const Signature& s) {
  std::ostringstream out;
  out << "shape [";
  // The first dimension of an all-gather may differ by rank and is not part of the agreement.
  if (s.kind == OpKind::kAllGather) out << (s.shape.empty() ? "*" : "*, ");
  for (std::size_t i = 0; i < s.shape.size(); ++i) out << (i ? ", " : "") << s.shape[i];
  out << "]";
  return out.str();
}

std::string Number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

// In the order in which a reader wants them: what it is before its details.
const std::vector<std::function<std::string(const Signature&)>>& Attributes() {
  static const std::vector<std::function<std::string(const Signature&)>> kAttributes = {
      [](const Signature& s) { return std::string(OpKindName(s.kind)); },
      [](const Signature& s) {
        return s.kind == OpKind::kAllReduce ? "op " + std::string(ReduceOpName(s.reduction)) : "";
      },
      [](const Signature& s) { return "dtype " + std::string(DTypeName(s.dtype)); },
      ShapeText,
      [](const Signature& s) {
        return s.wire ? "compressed to " + std::string(DTypeName(*s.wire)) : "not compressed";
      },
      [](const Signature& s) { return s.root < 0 ? "" : "root " + std::to_string(s.root); },
      [](const Signature& s) { return "prescale " + Number(s.prescale); },
      [](const Signature& s) { return "postscale " + Number(s.postscale); },
      [](const Signature& s) {
        return std::string(s.device == DeviceKind::kHost ? "on the host" : "on a GPU") +
               (s.slot == 0 ? "" : ", slot " + std::to_string(s.slot));
      },
      [](const Signature& s) {
        return s.layout == 0 ? "" : "bucket layout " + std::to_string(s.layout);
      },
  };
  return kAttributes;
}

}  // namespace

std::string RanksText(const RankRanges& ranks) {
  return (ranks.Count() == 1 ? "rank " : "ranks ") + ranks.ToString();
}

Origin FailOrigin(const Key& key, StatusCode code, const std::string& text) {
  Origin origin;
  origin.tensor = TensorName(key);
  if (code == StatusCode::kMismatch) return origin;
  // Behind the name, which may say anything, the ranks come first: see MismatchText and LeftText.
  const std::string name = key.ToString();
  const std::size_t named = text.find(name);
  std::size_t at = text.find("rank", named == std::string::npos ? 0 : named + name.size());
  if (at == std::string::npos) return origin;
  at = text.find(' ', at);
  if (at == std::string::npos) return origin;
  int rank = -1;
  const char* const end = text.data() + text.size();
  if (std::from_chars(text.data() + at + 1, end, rank).ec == std::errc()) origin.rank = rank;
  return origin;
}

std::string MismatchText(const Key& key, const std::vector<Variant>& variants,
                         std::uint32_t more_variants) {
  std::vector<const Variant*> valid;
  std::vector<const Variant*> invalid;
  for (const Variant& v : variants) {
    if (!v.invalid.empty()) {
      invalid.push_back(&v);
    } else if (v.signature) {
      valid.push_back(&v);
    }
  }
  // Whatever the order in which they arrived.
  for (auto* const groups : {&valid, &invalid}) {
    std::sort(groups->begin(), groups->end(), [](const Variant* a, const Variant* b) {
      return a->ranks.First() < b->ranks.First();
    });
  }
  std::vector<std::string> groups(valid.size());
  const auto join = [](std::string& to, const std::string& text) {
    if (text.empty()) return;
    to += (to.empty() ? "" : " ") + text;
  };
  for (const auto& attribute : Attributes()) {
    bool differs = false;
    for (const Variant* v : valid) {
      differs |= attribute(*v->signature) != attribute(*valid.front()->signature);
    }
    if (!differs) continue;
    for (std::size_t i = 0; i < valid.size(); ++i) join(groups[i], attribute(*valid[i]->signature));
  }

  std::string text;
  if (!valid.empty()) {
    bool same_kind = true;
    for (const Variant* v : valid)
      same_kind &= v->signature->kind == valid.front()->signature->kind;
    if (same_kind) text += std::string(OpKindName(valid.front()->signature->kind)) + " ";
  }
  text += key.ToString() + ": ";
  bool first = true;
  for (const Variant* v : invalid) {
    text += (first ? "" : "; ") + RanksText(v->ranks) + ": " + v->invalid;
    first = false;
  }
  const bool some_invalid = !first;
  for (std::size_t i = 0; i < valid.size(); ++i) {
    if (some_invalid && valid.size() == 1) {
      text += "; " + RanksText(valid[i]->ranks) + " asked for " + valid[i]->signature->ToString();
      break;
    }
    text += (first                    ? ""
             : some_invalid && i == 0 ? "; "
                                      : ", ") +
            groups[i] + " on " + RanksText(valid[i]->ranks);
    first = false;
  }
  if (more_variants > 0)
    text += " and " + std::to_string(more_variants) + " more different requests";
  return text;
}

}  // namespace sirtaki::core
