// Plans that anyone can read: tests/launch/plan/golden/.
//
// A script has lines of these kinds, and below "----" what came of its "run", until an empty line:
//   launcher PATH: TEXT           what the launcher prints when it is asked for its version
//   machine NAME CORES [root] [full=NAME]
//                                 where sirtakirun runs
//   env NAME=VALUE                from here on; "env" alone forgets them all
//   file PATH: LINE\nLINE         a file that can be read
//   gone [HOST...]                hosts that were lost in an earlier attempt; "gone" alone: none
//   interface NAME ADDRESS BITS   that this machine has; "interface" alone: none is known
//   route HOST INTERFACE SUBNET [far] [useless]
//                                 how a host is reached; "route" alone: none is known
//   run ARGUMENT...               makes the plan of "sirtakirun ARGUMENT..."
#include <arpa/inet.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "launch/base/shell_text.h"
#include "launch/options/option_rows.h"
#include "launch/plan/plan.h"
#include "tests/support/golden.h"

namespace sirtaki::launch {
namespace {

class Script {
 public:
  std::string Finish() { return std::exchange(happened_, {}); }

  void Command(const std::string& line) {
    const std::size_t space = std::min(line.find(' '), line.size());
    const std::string verb = line.substr(0, space);
    const std::string rest = line.substr(std::min(space + 1, line.size()));
    const std::size_t colon = rest.find(": ");
    std::string text = colon == std::string::npos ? "" : rest.substr(colon + 2);
    for (std::size_t at = 0; (at = text.find("\\n")) != std::string::npos;) {
      text.replace(at, 2, "\n");
    }
    if (verb == "launcher") {
      const auto launcher = RecognizeLauncher(rest.substr(0, colon), text);
      if (!launcher) throw std::runtime_error("no launcher: " + rest);
      input_.launcher = *launcher;
    } else if (verb == "machine") {
      const auto words = Words(rest);
      input_.machine = {std::string(words.at(0)), std::stoi(std::string(words.at(1)))};
      input_.is_root = words.size() > 2 && words[2] == "root";
      constexpr std::string_view kFull = "full=";
      if (words.back().starts_with(kFull)) {
        input_.machine.full_name = words.back().substr(kFull.size());
      }
    } else if (verb == "env") {
      const std::size_t equals = rest.find('=');
      if (rest.empty()) input_.environment = {};
      if (!rest.empty()) input_.environment.Set(rest.substr(0, equals), rest.substr(equals + 1));
    } else if (verb == "file") {
      files_[rest.substr(0, colon)] = text;
    } else if (verb == "gone") {
      input_.gone.clear();
      for (const std::string_view host : Words(rest)) input_.gone.emplace_back(host);
      input_.restarts = rest.empty() ? 0 : 1;
    } else if (verb == "interface") {
      AddInterface(Words(rest));
    } else if (verb == "route") {
      AddRoute(Words(rest));
    } else if (verb == "run") {
      Run(rest);
    } else {
      throw std::runtime_error("unknown command: " + line);
    }
  }

 private:
  void AddInterface(const std::vector<std::string_view>& words) {
    if (words.empty()) return input_.machine.interfaces.clear();
    in_addr address{};
    const bool is_address = inet_pton(AF_INET, std::string(words.at(1)).c_str(), &address) == 1;
    const auto bits = NumberFrom<int>(words.at(2), 1, 32);
    if (!is_address || !bits) throw std::runtime_error("no interface");
    input_.machine.interfaces.push_back(
        {std::string(words[0]), ntohl(address.s_addr), ~std::uint32_t{0} << (32 - *bits)});
  }

  void AddRoute(const std::vector<std::string_view>& words) {
    if (words.empty()) routes_.clear();
    if (!words.empty()) {
      const auto has = [&words](std::string_view word) {
        return std::find(words.begin() + 3, words.end(), word) != words.end();
      };
      routes_[std::string(words.at(0))] = {std::string(words.at(1)), std::string(words.at(2)),
                                           !has("far"), !has("useless")};
    }
    input_.route = [this](const std::string& host) -> std::optional<Route> {
      const auto found = routes_.find(host);
      if (found == routes_.end()) return std::nullopt;
      return found->second;
    };
  }

  void Run(const std::string& arguments) {
    input_.self = "/opt/sirtaki/bin/sirtakirun";
    input_.read = [this](const std::string& path) -> std::optional<std::string> {
      const auto found = files_.find(path);
      if (found == files_.end()) return std::nullopt;
      return found->second;
    };
    Plan plan;
    input_.options = {};
    core::Status status = ParseOptions(ShellWords(arguments).value(), input_.read, &input_.options);
    const LaunchOptions& options = input_.options;
    if (status.ok() && (options.help || options.version || options.check_build ||
                        !options.explain.empty() || !options.merge_timelines.empty())) {
      happened_ = "no plan is made\n";
      return;
    }
    if (status.ok()) status = MakePlan(input_, &plan);
    happened_ = status.ok() ? PlanText(plan) : status.ToString() + "\n";
    if (!plan.network.empty()) happened_ += "network: " + plan.network + "\n";
    for (const std::string& note : input_.options.notes) happened_ += "note: " + note + "\n";
  }

  PlanInput input_;
  std::map<std::string, std::string> files_;
  std::map<std::string, Route> routes_;
  std::string happened_;
};

constexpr const char* kFolder = "tests/launch/plan/golden";

class PlanGoldenTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PlanGoldenTest, HappensAsWritten) {
  Script script;
  tests::PlayGolden(
      kFolder, GetParam(), [&script](const std::string& line) { script.Command(line); },
      [&script] { return script.Finish(); });
}

// The names of the flags of a "run", which stand before the program.
std::set<std::string> FlagsOf(const std::string& run) {
  std::set<std::string> names;
  const auto words = ShellWords(run);
  for (const std::string& word : words.value()) {
    if (word == "./train" || word == "--") break;
    if (!word.starts_with('-')) continue;
    const std::string flag = word.substr(0, word.find('='));
    const OptionRow* row =
        flag.size() == 2 ? FindRow(flag[1]) : FindRow(flag.substr(flag.find_first_not_of('-')));
    if (row != nullptr) names.insert(row->name);
  }
  return names;
}

TEST(PlanGoldenScriptsTest, EveryFlagIsInOne) {
  std::set<std::string> names;
  for (const std::string& name : tests::GoldenScripts(kFolder)) {
    Script script;
    const auto command = [&](const std::string& line) {
      script.Command(line);
      constexpr std::string_view kRun = "run ";
      if (line.starts_with(kRun)) names.merge(FlagsOf(line.substr(kRun.size())));
    };
    tests::PlayGolden(kFolder, name, command, [&script] { return script.Finish(); });
  }
  for (const OptionGroup& group : OptionGroups()) {
    for (const OptionRow& row : group.rows) EXPECT_TRUE(names.contains(row.name)) << row.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Scripts, PlanGoldenTest,
                         ::testing::ValuesIn(tests::GoldenScripts(kFolder)),
                         [](const auto& script) { return script.param; });

}  // namespace
}  // namespace sirtaki::launch
