#include "core/mismatch.h"

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

std::string MismatchText(const Key& key, const std::vector<Variant>& variants,
                         std::uint32_t more_variants) {
  std::vector<const Variant*> valid;
  for (const Variant& v : variants) {
    if (v.invalid.empty() && v.signature) valid.push_back(&v);
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
  for (const Variant& v : variants) {
    if (v.invalid.empty()) continue;
    text += (first ? "" : "; ") + RanksText(v.ranks) + ": " + v.invalid;
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
