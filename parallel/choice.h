// Names of which one is meant. Pure.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "core/base/status.h"

namespace sirtaki::parallel {

// Finds a text among names. Fails with kInvalidArgument and a text that names all of them:
// "there is no schedule "gpip"; allowed is gpipe, 1f1b, interleaved_1f1b; the nearest known is gpipe".
core::Status FindChoice(std::string_view text, std::string_view what,
                        std::span<const std::string_view> names, std::size_t* index);

// The same for the names of an enumeration that counts from 0.
template <class Enum, std::size_t kCount>
core::Status ParseChoice(std::string_view text, std::string_view what,
                         const std::string_view (&names)[kCount], Enum* choice) {
  std::size_t index = 0;
  core::Status status = FindChoice(text, what, names, &index);
  if (status.ok()) *choice = static_cast<Enum>(index);
  return status;
}

}  // namespace sirtaki::parallel
