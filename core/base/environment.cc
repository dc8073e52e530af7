#include "core/base/environment.h"

#include <unistd.h>

namespace sirtaki::core {

EnvironmentView EnvironmentView::OfProcess() {
  EnvironmentView view;
  if (environ == nullptr) return view;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    // Should a name stand there twice, getenv gives the first.
    view.variables_.try_emplace(std::string(text.substr(0, equals)), text.substr(equals + 1));
  }
  return view;
}

std::optional<std::string> EnvironmentView::Find(std::string_view name) const {
  auto value = FindEvenEmpty(name);
  if (value && value->empty()) value.reset();
  return value;
}

std::optional<std::string> EnvironmentView::FindEvenEmpty(std::string_view name) const {
  const auto found = variables_.find(name);
  if (found == variables_.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> EnvironmentView::NamesWithPrefix(std::string_view prefix) const {
  std::vector<std::string> names;
  for (auto it = variables_.lower_bound(prefix); it != variables_.end(); ++it) {
    if (!it->first.starts_with(prefix)) break;
    if (!it->second.empty()) names.push_back(it->first);
  }
  return names;
}

}  // namespace sirtaki::core
