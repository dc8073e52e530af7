# How tests are declared and registered. Labels say what a test needs: unit and inproc nothing, mpi an MPI, torch a
# LibTorch; `ctest -L unit` is the quick one.
include(GoogleTest)

# sirtaki_add_gtest(<name> <label> SOURCES ... LIBRARIES ... [WHOLE] [PREFIX <text>] [UNITE [ALONE <regex>]]): one program,
# its cases found when ctest starts and called PREFIX and their name; WHOLE: a single test, for programs that take long to
# start; UNITE and ALONE: as of sirtaki_add_layer.
function(sirtaki_add_gtest name label)
  cmake_parse_arguments(PARSE_ARGV 2 arg "WHOLE;UNITE" "PREFIX;ALONE" "SOURCES;LIBRARIES")
  add_executable(${name} ${arg_SOURCES})
  if(arg_UNITE)
    sirtaki_unite_sources(${name} "${arg_ALONE}" ${arg_SOURCES})
  endif()
  target_link_libraries(${name} PRIVATE sirtaki_flags sirtaki_test_support ${arg_LIBRARIES} GTest::gmock GTest::gtest_main)
  if(arg_WHOLE)
    add_test(NAME ${arg_PREFIX}${name} COMMAND ${name} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
    set_tests_properties(${arg_PREFIX}${name} PROPERTIES LABELS "${label}" TIMEOUT 900)
    return()
  endif()
  gtest_discover_tests(${name}
    DISCOVERY_MODE PRE_TEST
    TEST_PREFIX "${arg_PREFIX}"
    WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}"
    PROPERTIES LABELS "${label}" TIMEOUT 300)
endfunction()

# sirtaki_register_mpi_test(<name> <target> RANKS <n>... LABELS <label>... [ENVIRONMENT <name>=<value>...]): one ctest
# entry a rank count.
function(sirtaki_register_mpi_test name target)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "RANKS;LABELS;ARGUMENTS;ENVIRONMENT")
  foreach(ranks IN LISTS arg_RANKS)
    add_test(NAME ${name}.ranks_${ranks}
      COMMAND bash "${PROJECT_SOURCE_DIR}/tests/support/mpirun.sh" ${ranks} $<TARGET_FILE:${target}> ${arg_ARGUMENTS}
      WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
    set_tests_properties(${name}.ranks_${ranks} PROPERTIES
      LABELS "${arg_LABELS};ranks_${ranks}"
      PROCESSORS ${ranks}
      TIMEOUT 300   # mpirun.sh ends the ranks a little earlier
      SKIP_RETURN_CODE 77
      ENVIRONMENT "MPIEXEC=${MPIEXEC_EXECUTABLE};${arg_ENVIRONMENT}")
  endforeach()
endfunction()

# sirtaki_add_mpi_test(<source> PREFIX <word> LABELS <label>... LIBRARIES <library>... [TARGET <variable>]): one program a file; its rank counts stand in the
# source, as `// RANKS: 1 2 3 4` (2 where no such line is).
function(sirtaki_add_mpi_test source)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "PREFIX;TARGET" "LABELS;LIBRARIES")
  get_filename_component(stem "${source}" NAME_WE)
  set(name ${arg_PREFIX}.${stem})
  set(target sirtaki_${arg_PREFIX}_${stem})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(STRINGS "${source}" line REGEX "^// RANKS:( +[0-9]+)+ *$" LIMIT_COUNT 1)
  set(ranks 2)
  if(line)
    string(REGEX MATCHALL "[0-9]+" ranks "${line}")
  endif()
  add_executable(${target} "${source}")
  target_link_libraries(${target} PRIVATE
    sirtaki_flags sirtaki_mpi_test_main sirtaki_test_support ${arg_LIBRARIES} sirtaki_mpi_bindings GTest::gmock GTest::gtest)
  sirtaki_register_mpi_test(${name} ${target} RANKS ${ranks} LABELS ${arg_LABELS})
  if(arg_TARGET)
    set(${arg_TARGET} ${target} PARENT_SCOPE)
  endif()
endfunction()

# sirtaki_add_script_test(<name> LABELS <label>... COMMAND ...): exit code 77 means skipped, its reason on the output.
function(sirtaki_add_script_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;PROCESSORS" "LABELS;COMMAND")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  add_test(NAME ${name} COMMAND ${arg_COMMAND} WORKING_DIRECTORY "${PROJECT_SOURCE_DIR}")
  set_tests_properties(${name} PROPERTIES
    LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} PROCESSORS ${arg_PROCESSORS} SKIP_RETURN_CODE 77
    ENVIRONMENT "MPIEXEC=${MPIEXEC_EXECUTABLE};CXX=${CMAKE_CXX_COMPILER};CMAKE=${CMAKE_COMMAND}")
endfunction()
