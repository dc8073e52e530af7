// The YAML file of --config-file.
//
// file := a map of flags, without their dashes, to their values; underscores are dashes. A list is
//         one value with commas, of "export" one a variable, and of "mpi-args" and its like one a
//         word. Flags may also stand in the sections that Horovod's files have.
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "core/base/text.h"
#include "launch/base/shell_text.h"
#include "launch/options/option_rows.h"

namespace sirtaki::launch {

using core::Quoted;
using core::Status;
using core::StatusCode;

namespace {

// How a section's keys become flags.
struct Section {
  std::string_view name;
  std::string_view prefix;   // of its keys
  std::string_view enabled;  // what its key "enabled" is
};
constexpr std::array<Section, 6> kSections = {{{"params", "", ""},
                                               {"library-options", "", ""},
                                               {"autotune", "autotune-", "autotune"},
                                               {"stall-check", "stall-check-", "stall-check"},
                                               {"timeline", "timeline-", ""},
                                               {"logging", "log-", ""}}};

std::string Dashed(std::string text) {
  std::replace(text.begin(), text.end(), '_', '-');
  return text;
}

class FileReader {
 public:
  FileReader(const std::string& path, std::vector<Given>* out) : path_(path), out_(*out) {}

  Status ReadRoot(const YAML::Node& root) {
    if (root.IsNull()) return Status::Ok();
    if (!root.IsMap()) return Wrong(root.Mark(), "expected lines \"flag: value\"");
    for (const auto& entry : root) {
      Status status = ReadEntry(entry.first, entry.second);
      if (!status.ok()) return status;
    }
    return Status::Ok();
  }

  Status Wrong(const YAML::Mark& mark, const std::string& text) const {
    return {StatusCode::kInvalidArgument, Place(mark) + ": " + text};
  }

 private:
  std::string Place(const YAML::Mark& mark) const {
    return Quoted(path_) + ", line " + std::to_string(mark.line + 1);
  }

  Status ReadEntry(const YAML::Node& key, const YAML::Node& value) {
    if (!key.IsScalar()) return Wrong(key.Mark(), "expected the name of a flag");
    const std::string name = Dashed(key.Scalar());
    if (!value.IsMap()) return ReadFlag(name, key.Mark(), value);
    const auto section = std::find_if(kSections.begin(), kSections.end(),
                                      [&](const Section& known) { return known.name == name; });
    if (section == kSections.end()) {
      return Wrong(key.Mark(), "there is no section " + Quoted(key.Scalar()));
    }
    for (const auto& entry : value) {
      if (!entry.first.IsScalar()) return Wrong(entry.first.Mark(), "expected the name of a flag");
      const std::string inner = Dashed(entry.first.Scalar());
      const bool enabled = inner == "enabled" && !section->enabled.empty();
      Status status =
          ReadFlag(enabled ? std::string(section->enabled) : std::string(section->prefix) + inner,
                   entry.first.Mark(), entry.second);
      if (!status.ok()) return status;
    }
    return Status::Ok();
  }

  Status ReadFlag(const std::string& name, const YAML::Mark& mark, const YAML::Node& value) {
    const OptionRow* row = FindRow(name);
    if (row == nullptr) {
      return Wrong(mark, "there is no flag " + Quoted(name) + NearestFlag(name, ""));
    }
    for (const std::string_view outside : {"config-file", "check-build", "help", "version"}) {
      if (row->name == outside) return Wrong(mark, Quoted(name) + " is for the command line only");
    }
    if (!seen_.insert(row->name).second) return Wrong(mark, Quoted(name) + " is given twice");
    std::vector<std::string> values;
    if (value.IsScalar()) {
      values.push_back(value.Scalar());
    } else if (value.IsSequence() && !row->IsSwitch()) {
      for (const YAML::Node& item : value) {
        if (!item.IsScalar()) return Wrong(item.Mark(), "expected a value");
        values.push_back(item.Scalar());
      }
      if (row->value == kArguments) {
        for (std::string& word : values) word = ShellQuoted(word);
        values = {Joined(values, " ")};
      } else if (row->name != "export") {
        values = {Joined(values, ",")};
      }
    } else {
      return Wrong(mark, Quoted(name) + " needs a value");
    }
    for (std::string& text : values) {
      Given given{row->name, std::move(text), Place(mark) + ": " + name};
      if (row->IsSwitch()) {
        if (Status status = ReadSwitch(&given); !status.ok()) return status;
      }
      out_.push_back(std::move(given));
    }
    return Status::Ok();
  }

  const std::string& path_;
  std::vector<Given>& out_;
  std::set<std::string> seen_;
};

}  // namespace

Status ReadOptionsFile(const std::string& path, const std::string& text, std::vector<Given>* out) {
  std::vector<Given> given;
  FileReader reader(path, &given);
  Status status;
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      status =
          reader.Wrong(documents[1].Mark(), "a second document begins; put all flags into one");
    } else if (!documents.empty()) {
      status = reader.ReadRoot(documents[0]);
    }
  } catch (const YAML::Exception& error) {
    status = reader.Wrong(error.mark, error.msg);
  }
  if (status.ok()) *out = std::move(given);
  return status;
}

}  // namespace sirtaki::launch
