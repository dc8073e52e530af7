// --check-build prints this: what was built in, what is found when it runs, and what to do where
// that is not enough to train.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/base/environment.h"
#include "launch/base/build_facts.h"

namespace sirtaki::launch {

struct BuildRow {
  std::string name;
  bool there = false;
  std::string text;  // versions and paths, or why it is not there
  std::string cure;  // what to do; empty if ranks can train all the same
};

// Looks for what ranks need on this machine; `self` is the path of sirtakirun. Starts programs and
// loads libraries to ask them for their versions.
std::vector<BuildRow> FindParts(const std::string& self, const core::EnvironmentView& env);

// Gives cures to the rows of parts that do not fit each other or the build. Pure.
void AddCures(const BuildFacts& facts, std::vector<BuildRow>* parts);

// The text: of the build, below it of the parts, and of the parts' cures. Pure.
std::string BuildText(const BuildFacts& facts, const std::string& self,
                      const std::vector<BuildRow>& parts);

// The build of LibTorch by its version.py, "2.11.0+cu130"; empty if it does not stand there. Pure.
std::string TorchVersionIn(std::string_view version_py);

}  // namespace sirtaki::launch
