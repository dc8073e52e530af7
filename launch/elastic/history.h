// The history of an elastic job is kept beside its timeline and its flight records, for
// --merge-timelines and --explain.
#pragma once

#include <string>
#include <vector>

#include "core/base/environment.h"
#include "core/base/types.h"
#include "launch/options/options.h"
#include "launch/reports/generations.h"

namespace sirtaki::launch {

// One thread uses it. Beside flight records there is a history as soon as there is something to
// explain. A file that cannot be written is told once on standard error; the job goes on.
class History {
 public:
  // The folders are those of the ranks' options timeline and flight_records. A history that is there
  // is an earlier job's, and is replaced.
  History(const LaunchOptions& options, const core::EnvironmentView& env);

  // Write adds a note; one without a host gets that of sirtakirun. A worker that is gone belongs to the
  // generation in whose time it went; 0: before the first one.
  void Write(GenerationNote note);

 private:
  struct File {
    std::string path;
    bool begins_at_once = false;
    bool has_begun = false;
  };

  const std::string host_;
  std::vector<File> files_;  // those that can be written
  std::string waiting_;      // the lines so far, for files that have not begun
};

// A job that is not elastic has no history: one in its folders would be taken for its own.
void SetHistoriesAside(const LaunchOptions& options, const core::EnvironmentView& env);

}  // namespace sirtaki::launch
