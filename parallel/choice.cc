#include "parallel/choice.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/base/spelling.h"
#include "core/base/text.h"
#include "core/base/words.h"

namespace sirtaki::parallel {

core::Status FindChoice(std::string_view text, std::string_view what,
                        std::span<const std::string_view> names, std::size_t* index) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found != names.end()) {
    *index = static_cast<std::size_t>(found - names.begin());
    return core::Status::Ok();
  }
  return {core::StatusCode::kInvalidArgument,
          "there is no " + std::string(what) + " " + core::Quoted(text) + "; allowed is " +
              core::Joined(names, ", ") +
              core::NearestText(text, std::vector<std::string>(names.begin(), names.end()))};
}

}  // namespace sirtaki::parallel
