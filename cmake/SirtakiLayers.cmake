# sirtaki_add_layer(<target> <folder>... [INCLUDE <regex>] [EXCLUDE <regex>] [ALONE <regex>])
#
# A static, position independent library of every .cc file that lies directly in the folders (and matches). Includes are written
# from the top of the tree: #include "core/status.h". ALONE: what SIRTAKI_UNITY does not compile together with others, for a
# name of its own that one of them has as well.
function(sirtaki_add_layer target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "INCLUDE;EXCLUDE;ALONE" "")
  set(sources "")
  foreach(folder IN LISTS arg_UNPARSED_ARGUMENTS)
    file(GLOB found CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${folder}/*.cc")
    list(APPEND sources ${found})
  endforeach()
  if(arg_INCLUDE)
    list(FILTER sources INCLUDE REGEX "${arg_INCLUDE}")
  endif()
  if(arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX "${arg_EXCLUDE}")
  endif()
  if(NOT sources)   # a folder of headers only
    set(sources "${PROJECT_BINARY_DIR}/empty_layer.cc")
    file(CONFIGURE OUTPUT "${sources}" CONTENT "// Nothing to compile in this folder.\n")
  endif()
  add_library(${target} STATIC ${sources})
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${target} PRIVATE sirtaki_flags)
  sirtaki_unite_sources(${target} "${arg_ALONE}" ${sources})
endfunction()

# sirtaki_unite_sources(<target> <regex or nothing> <source>...): with SIRTAKI_UNITY, several sources are one for the
# compiler, but those that match, those that Highway includes anew for each processor, and those with macros of their own.
function(sirtaki_unite_sources target alone)
  if(NOT SIRTAKI_UNITY)
    return()
  endif()
  foreach(source IN LISTS ARGN)
    file(STRINGS "${source}" macros REGEX "HWY_TARGET_INCLUDE|^#define " LIMIT_COUNT 1)
    if(macros OR (NOT alone STREQUAL "" AND source MATCHES "${alone}"))
      set_source_files_properties("${source}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
endfunction()
