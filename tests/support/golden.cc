#include "tests/support/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/base/environment.h"

namespace sirtaki::tests {
namespace {

std::filesystem::path PathOf(const std::string& folder) {
  return std::filesystem::path(SIRTAKI_SOURCE_DIR) / folder;
}

}  // namespace

std::vector<std::string> GoldenScripts(const std::string& folder) {
  std::vector<std::string> scripts;
  for (const auto& entry : std::filesystem::directory_iterator(PathOf(folder))) {
    if (entry.path().extension() == ".txt") scripts.push_back(entry.path().stem().string());
  }
  std::sort(scripts.begin(), scripts.end());
  return scripts;
}

void PlayGolden(const std::string& folder, const std::string& script,
                const std::function<void(const std::string& line)>& command,
                const std::function<std::string()>& finish) {
  const std::filesystem::path path = PathOf(folder) / (script + ".txt");
  std::ifstream file(path);
  std::stringstream written;
  written << file.rdbuf();
  std::istringstream in(written.str());
  std::string seen;  // the file again, with what happened in place of what was expected
  bool expected = false;
  for (std::string line; std::getline(in, line);) {
    if (line == "----") {
      expected = true;
      seen += "----\n" + finish();
    } else if (expected) {
      if (!line.empty()) continue;
      expected = false;
      seen += "\n";
    } else {
      seen += line + "\n";
      if (!line.empty() && line[0] != '#') command(line);
    }
  }
  if (core::EnvironmentView::OfProcess().Find("SIRTAKI_TEST_WRITE_GOLDEN")) {
    std::ofstream(path) << seen;
  }
  EXPECT_EQ(seen, written.str()) << "in " << path;
}

}  // namespace sirtaki::tests
