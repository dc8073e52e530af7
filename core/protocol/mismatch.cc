#include "core/protocol/mismatch.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <sstream>

#include "core/base/text.h"

namespace sirtaki::core {
namespace {

std::string Number(double value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

// The attributes stand in the order in which a reader wants them: what it is before its details.
const std::vector<std::function<std::string(const Signature&)>>& Attributes() {
  // Never destroyed: other ranks' requests are judged while the program exits.
  using All = std::vector<std::function<std::string(const Signature&)>>;
  static const All& kAttributes = *new All{
      [](const Signature& s) { return std::string(OpKindName(s.kind)); },
      [](const Signature& s) {
        return Reduces(s.kind) ? "op " + std::string(ReduceOpName(s.reduction)) : "";
      },
      [](const Signature& s) { return "dtype " + std::string(DTypeName(s.dtype)); },
      [](const Signature& s) {
        if (s.kind == OpKind::kBarrier) return std::string();
        // The first dimension of a gather may differ by rank and is not part of the agreement.
        return "shape " + ShapeText(s.shape, FirstDimensionVaries(s.kind));
      },
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
      [](const Signature& s) {
        return s.round == 0 ? "" : "average " + std::to_string(s.round) + " of the step";
      }};
  return kAttributes;
}

void AppendWord(std::string& to, const std::string& text) {
  if (text.empty()) return;
  to += (to.empty() ? "" : " ") + text;
}

// Each text is what its signature says where they do not all say the same.
std::vector<std::string> Differences(const std::vector<const Signature*>& signatures) {
  std::vector<std::string> texts(signatures.size());
  bool grouped = false;
  for (const Signature* s : signatures) grouped |= !s->parts.empty();
  for (const auto& attribute : Attributes()) {
    // A group has nothing of its own but its kind.
    if (grouped && &attribute != &Attributes().front()) break;
    bool differs = false;
    for (const Signature* s : signatures) differs |= attribute(*s) != attribute(*signatures[0]);
    if (!differs) continue;
    for (std::size_t i = 0; i < texts.size(); ++i) AppendWord(texts[i], attribute(*signatures[i]));
  }
  // Grouped calls differ in how many tensors they have, or in the first of them that differs.
  const auto count = [](const Signature& s) { return s.parts.size(); };
  bool same_count = true;
  std::size_t parts = 0;
  for (const Signature* s : signatures) {
    same_count &= count(*s) == count(*signatures[0]);
    parts = count(*s);
  }
  if (!same_count) {
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const std::size_t n = count(*signatures[i]);
      AppendWord(texts[i], n == 0   ? "one tensor, not grouped"
                           : n == 1 ? "a group of 1 tensor"
                                    : "a group of " + std::to_string(n) + " tensors");
    }
    return texts;
  }
  for (std::size_t p = 0; p < parts; ++p) {
    std::vector<const Signature*> column;
    for (const Signature* s : signatures) column.push_back(s->parts[p].get());
    const std::vector<std::string> differences = Differences(column);
    bool differs = false;
    for (const std::string& text : differences) differs |= text != differences[0];
    if (!differs) continue;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      AppendWord(texts[i], "tensor " + std::to_string(p) + ": " + differences[i]);
    }
    break;
  }
  return texts;
}

}  // namespace

std::string RanksText(const RankRanges& ranks) {
  return (ranks.Count() == 1 ? "rank " : "ranks ") + ranks.ToString();
}

Origin FailOrigin(const Key& key, StatusCode code, const std::string& text) {
  Origin origin;
  origin.tensor = TensorName(key);
  if (code == StatusCode::kMismatch) return origin;
  // The ranks come first behind the name, which may say anything: see MismatchText and LeftText.
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
    } else if (v.asked != Asked()) {
      valid.push_back(&v);
    }
  }
  // Whatever the order in which they arrived.
  for (auto* const groups : {&valid, &invalid}) {
    std::sort(groups->begin(), groups->end(), [](const Variant* a, const Variant* b) {
      return a->ranks.First() < b->ranks.First();
    });
  }
  std::vector<const Signature*> collectives;
  for (const Variant* v : valid) {
    if (const SignaturePtr& signature = CollectiveOf(v->asked)) {
      collectives.push_back(signature.get());
    }
  }
  std::vector<std::string> groups(valid.size());
  if (collectives.size() == valid.size()) groups = Differences(collectives);

  std::string text;
  if (!valid.empty()) {
    bool same_kind = true;
    const std::string_view kind = KindName(valid.front()->asked);
    for (const Variant* v : valid) same_kind &= KindName(v->asked) == kind;
    if (same_kind) text.append(kind).append(" ");
    for (std::size_t i = 0; i < valid.size() && collectives.size() < valid.size(); ++i) {
      groups[i] = same_kind ? DetailText(valid[i]->asked) : AskedText(valid[i]->asked);
    }
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
      text += "; " + RanksText(valid[i]->ranks) + " asked for " + AskedText(valid[i]->asked);
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
