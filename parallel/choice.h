// Words of which an option is one. Pure.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/spelling.h"
#include "core/base/status.h"
#include "core/base/text.h"

namespace sirtaki::parallel {

// The enumerator that has this name. Fails with kInvalidArgument and a text that names all of them:
// "there is no schedule "gpip"; allowed is gpipe, 1f1b, interleaved_1f1b; the nearest known is gpipe".
template <class Enum, std::size_t kCount>
core::Status ParseChoice(std::string_view text, std::string_view what,
                         const std::string_view (&names)[kCount], Enum* choice) {
  std::string allowed;
  std::vector<std::string> known;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i] == text) {
      *choice = static_cast<Enum>(i);
      return core::Status::Ok();
    }
    known.emplace_back(names[i]);
    allowed += (i == 0 ? "" : ", ") + known.back();
  }
  return {core::StatusCode::kInvalidArgument, "there is no " + std::string(what) + " " +
                                                  core::Quoted(text) + "; allowed is " + allowed +
                                                  core::NearestText(text, known)};
}

}  // namespace sirtaki::parallel
