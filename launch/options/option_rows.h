// The table of sirtakirun's flags, from which ParseOptions and HelpText are made. The flags of the
// library's options come from the table in core/config/config_table.h.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "launch/options/options.h"

namespace sirtaki::launch {

// A flag as it was given.
struct Given {
  std::string name;   // "np": without dashes
  std::string value;  // of a switch "true" or "false"
  std::string from;   // for texts: "--np", or "\"run.yaml\", line 3: np"
};

// "from: text" as kInvalidArgument.
core::Status WrongFlag(const Given& given, const std::string& text);

// Makes a switch's value "true" or "false".
core::Status ReadSwitch(Given* given);
// "; the nearest known is --np", or nothing; `dashes` are those that `given` begins with.
std::string NearestFlag(const std::string& given, const std::string& dashes);

// This word stands for the value of flags that take words as a shell does.
inline constexpr std::string_view kArguments = "ARGS";

struct OptionRow {
  std::string name;
  char letter = 0;    // of "-H"
  std::string value;  // what stands for its value in the help; empty: a switch
  std::string help;
  std::function<core::Status(const Given&, LaunchOptions*)> apply;

  bool IsSwitch() const { return value.empty(); }
};

struct OptionGroup {
  std::string title;
  std::vector<OptionRow> rows;
};

const std::vector<OptionGroup>& OptionGroups();
// The row that has the flag; null if there is none. FindRow knows other spellings too.
const OptionRow* FindRow(std::string_view name);
const OptionRow* FindRow(char letter);

// The groups by which OptionGroups is put together.
OptionGroup LibraryOptions();
OptionGroup HorovodOptions();

// A switch of LaunchOptions, and a text that is taken as it is.
OptionRow Switch(std::string name, char letter, std::string help, bool LaunchOptions::*member);
OptionRow Text(std::string name, char letter, std::string value, std::string help,
               std::string LaunchOptions::*member);
// Sets an option of the library: refuses a value that it does not allow.
core::Status SetKnob(const Given& given, std::string_view option, const std::string& value,
                     LaunchOptions* out);

// The flags that stand in a YAML file, in its order. kInvalidArgument names the file and the line.
core::Status ReadOptionsFile(const std::string& path, const std::string& text,
                             std::vector<Given>* out);

}  // namespace sirtaki::launch
