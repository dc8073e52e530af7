// The process's environment, as a value. environment.cc is the only file that reads it; everything
// else takes a view, so that a test or another session can have its own.
#pragma once

#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sirtaki::core {

class EnvironmentView {
 public:
  EnvironmentView() = default;  // empty
  EnvironmentView(std::initializer_list<std::pair<const std::string, std::string>> variables)
      : variables_(variables) {}

  // A copy of the process's environment as it is now. As for getenv, no other thread may change it
  // meanwhile.
  static EnvironmentView OfProcess();

  // The value. A variable that is set to nothing counts as not set, as shells and container files
  // often cannot unset one.
  std::optional<std::string> Find(std::string_view name) const;
  // FindEvenEmpty gives the value also where the variable is set to nothing, which may have a meaning.
  std::optional<std::string> FindEvenEmpty(std::string_view name) const;

  // Names of the variables that begin so and are set, in order.
  std::vector<std::string> NamesWithPrefix(std::string_view prefix) const;

  void Set(std::string name, std::string value) {
    variables_.insert_or_assign(std::move(name), std::move(value));
  }

 private:
  std::map<std::string, std::string, std::less<>> variables_;
};

}  // namespace sirtaki::core
