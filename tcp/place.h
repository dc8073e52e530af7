// A rank's place in a job without MPI: which one it is, of how many, where the ranks meet, and the
// secret by which they know each other. Whatever has started the ranks says it by variables.
#pragma once

#include <optional>
#include <string>

#include "core/base/environment.h"
#include "core/base/status.h"

namespace sirtaki::tcp {

struct Place {
  int rank = 0;
  int size = 1;
  std::string address;  // of rank 0's host: a name or a number
  int port = 0;         // where rank 0 listens
  std::string secret;
  int slot = 0;  // of its host, in an elastic job; see core::Place
};

// Whether the variables say that there are several ranks and where they meet.
bool IsToldPlace(const core::EnvironmentView& variables);

// kInvalidArgument: a variable is missing or wrong; names it, what is allowed and the cure.
//
//   RANK, else JOB_COMPLETION_INDEX (Kubernetes), else SLURM_PROCID
//   WORLD_SIZE, else SLURM_NTASKS
//   MASTER_ADDR
//   SIRTAKI_PORT, else MASTER_PORT, else 29400. Where torchrun's agent listens at MASTER_PORT, which
//   TORCHELASTIC_USE_AGENT_STORE=True says, it is the port behind that
//   SIRTAKI_SECRET, else the text in the file SIRTAKI_SECRET_FILE
core::Status FindPlace(const core::EnvironmentView& variables, Place* place);
// The secret alone, by the last line.
core::Status FindSecret(const core::EnvironmentView& variables, std::string* secret);

}  // namespace sirtaki::tcp
